"""Every reason why a layout cannot train a model with a batch, whatever the engine: each names its key and a remedy."""

import math
from collections.abc import Iterator

from harness import placement
from harness.config import RunConfig, divisors
from harness.errors import UserError
from harness.layout import Layout
from harness.plan.pipeline import round_size


def refusals(config: RunConfig, layout: Layout) -> Iterator[str]:
    """One line each; nothing if the layout can be run."""
    try:
        micro_batches = layout.accumulation(config.train)
    except UserError as error:
        yield str(error)
        return
    if config.data.kind == "text" and config.model.vocab_size < 256:
        yield f"model.vocab_size={config.model.vocab_size} is too small for data={config.data.name}: choose 256 or more"
    if layout.tp > 1 or layout.sequence_parallel:
        yield from tensor_refusals(config, layout)
    if layout.pp > 1:
        yield from pipeline_refusals(config, layout, micro_batches)
    elif layout.virtual_stages > 1:
        yield f"strategy.virtual_stages={layout.virtual_stages} needs strategy.pp of 2 or more: choose 1"
    if layout.pp == 1 and layout.layers_per_stage is not None:
        yield f"strategy.layers_per_stage={list(layout.layers_per_stage)} needs strategy.pp of 2 or more: choose null"
    if layout.cp > 1:
        yield f"strategy.cp={layout.cp} is not supported yet: choose 1"


def tensor_refusals(config: RunConfig, layout: Layout) -> Iterator[str]:
    tp, model, seq_len = layout.tp, config.model, config.train.seq_len
    all_divide = math.gcd(model.num_key_value_heads, model.intermediate_size)  # heads are a multiple of the first
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(model, key)
        if size % tp:
            yield f"strategy.tp={tp} does not divide model.{key}={size}: choose {divisors(all_divide)}"
    if (
        layout.vocabulary_parallel and (tp - 1) * math.ceil(model.vocab_size / tp) >= model.vocab_size
    ):  # cut into equal parts, the last what is left
        yield f"strategy.tp={tp} leaves a rank without a part of model.vocab_size={model.vocab_size}: choose a smaller"
    if layout.sequence_parallel and tp == 1:
        yield "strategy.sequence_parallel=true needs strategy.tp of 2 or more: choose false"
    if layout.sequence_parallel and seq_len % tp:
        yield (
            f"strategy.tp={tp} with strategy.sequence_parallel does not divide train.seq_len={seq_len}: choose a"
            f" multiple of {tp}"
        )


def pipeline_refusals(config: RunConfig, layout: Layout, micro_batches: int) -> Iterator[str]:
    p, virtual, schedule = layout.pp, layout.virtual_stages, layout.schedule
    try:
        placement.stages(config.model, layout)
    except UserError as error:
        yield str(error)
    if config.model.tie_word_embeddings:
        yield f"model.tie_word_embeddings=true ties the first stage of strategy.pp={p} to the last: choose false"
    if schedule in ("gpipe", "1f1b") and virtual > 1:
        yield (
            f"strategy.virtual_stages={virtual} is not part of strategy.schedule={schedule}: choose 1, or"
            " interleaved_1f1b or zero_bubble"
        )
    if schedule == "interleaved_1f1b" and virtual == 1:
        yield f"strategy.virtual_stages=1 interleaves nothing, strategy.schedule={schedule}: choose 2 or more, or 1f1b"
    made = (
        f"train.global_batch={config.train.global_batch} and train.micro_batch={config.train.micro_batch} make"
        f" {micro_batches} micro-batches"
    )
    if micro_batches < p:
        yield f"{made}, fewer than strategy.pp={p} stages: choose a smaller micro_batch or a larger global_batch"
    elif schedule in ("interleaved_1f1b", "zero_bubble") and micro_batches % (micro_batches // p):
        size = round_size(layout, micro_batches)
        yield (
            f"{made}, which strategy.schedule={schedule} cannot take in rounds of {size}: choose train.global_batch a"
            f" multiple of {p * config.train.micro_batch}"
        )
