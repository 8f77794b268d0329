"""The reasons why a layout cannot train a model with a batch, whatever the engine; each names its key and a remedy."""

from collections.abc import Iterator

from harness.config.schema import RunConfig
from harness.layout.layout import Layout, micro_batches_per_round
from harness.layout.model_profile import model_profile
from harness.layout.partition import split_into_stages
from harness.util.errors import UserError


def incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield one line for every reason why the configuration cannot run as this layout; nothing if it can."""
    try:
        micro_batches = layout.grad_accumulation_steps(config.train)
    except UserError as error:
        yield str(error)
        return
    chunks, tokens = config.train.loss_chunks, config.train.micro_batch * config.train.seq_len // layout.cp
    if tokens % chunks:
        yield f"train.loss_chunks={chunks} does not divide the {tokens} tokens of a micro-batch: choose a divisor"
    if chunks > 1 and layout.splits_backward:
        yield (
            f"train.loss_chunks={chunks} saves nothing under strategy.schedule=zero_bubble, which keeps the gradients"
            " of all logits for the weights' half of the backward: choose 1, or another schedule"
        )
    if config.checkpointing.name == "selective" and layout.splits_backward:
        yield (
            "checkpointing=selective can recompute a layer once from what it saved, and strategy.schedule=zero_bubble"
            " recomputes it for each half of a backward: choose full, every_n or attention, or another schedule"
        )
    if config.checkpointing.offload_activations:
        yield from offload_incompatibilities(config)
    if config.data.kind == "text" and config.model.vocab_size < 256:
        yield (
            f"model.vocab_size={config.model.vocab_size} is too small for the bytes of data={config.data.name}: choose"
            " 256 or more"
        )
    profile = model_profile(config.model)
    yield from profile.incompatibilities(config, layout)
    if layout.pp_enabled and profile.supports_pipeline:
        yield from pipeline_incompatibilities(config, layout, micro_batches)
    if layout.zero_stage > 0 and layout.dp_replicate > 1 and layout.axes_size(layout.sharding_axes) == 1:
        yield (
            f"strategy.zero_stage={layout.zero_stage} over strategy.dp_shard=1 shards nothing, and would train"
            f" {layout.dp_replicate} whole copies: choose strategy.dp_shard of 2 or more, or strategy.zero_stage=0"
        )
    if not layout.pp_enabled and layout.virtual_stages > 1:
        yield f"strategy.virtual_stages={layout.virtual_stages} needs strategy.pp of 2 or more: choose 1"
    if not layout.pp_enabled and layout.layers_per_stage is not None:
        yield f"strategy.layers_per_stage={list(layout.layers_per_stage)} needs strategy.pp of 2 or more: choose null"
    if layout.cp_enabled and config.train.seq_len % (2 * layout.cp):
        yield (
            f"strategy.cp={layout.cp} cuts sequences into {2 * layout.cp} chunks: choose train.seq_len a multiple of"
            f" {2 * layout.cp}, not {config.train.seq_len}"
        )


def offload_incompatibilities(config: RunConfig) -> Iterator[str]:
    """Yield a line for every setting that saves activations without the hooks that would move them to the host."""
    key = "checkpointing.offload_activations=true"
    if config.checkpointing.name == "selective":
        yield f"{key} does not reach what checkpointing=selective keeps: choose none, full, every_n or attention"
    if config.train.compile:
        yield f"{key} does not reach what train.compile=true keeps inside a layer: choose one of the two"


def pipeline_incompatibilities(config: RunConfig, layout: Layout, micro_batches: int) -> Iterator[str]:
    """Yield why the model cannot be cut into stages, or the schedule cannot take so many micro-batches."""
    p, virtual, schedule = layout.pp, layout.virtual_stages, layout.schedule
    try:
        split_into_stages(config.model, layout)
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
        yield f"strategy.virtual_stages=1 is too few for strategy.schedule={schedule}: choose 2 or more, or 1f1b"
    batch = (
        f"train.global_batch={config.train.global_batch} and train.micro_batch={config.train.micro_batch} make"
        f" {micro_batches} micro-batches"
    )
    if micro_batches < p:
        yield (
            f"{batch}, fewer than strategy.pp={p} stages: choose a smaller train.micro_batch or a larger"
            " train.global_batch"
        )
    elif schedule in ("interleaved_1f1b", "zero_bubble") and micro_batches % (micro_batches // p):
        size = micro_batches_per_round(layout.pp, micro_batches)
        yield (
            f"{batch}, which strategy.schedule={schedule} cannot take in rounds of {size}: choose a train.global_batch"
            f" that is a multiple of {p * config.train.micro_batch}"
        )
