"""The reasons why a layout cannot train a model with a batch, whatever the engine; each names its key and a remedy."""

import math
from collections.abc import Iterator

from harness.config.hf_model_info import HFModelInfo
from harness.config.schema import RunConfig
from harness.config.validation import divisors_text
from harness.layout.layout import Layout
from harness.layout.partition import SHARD_DIM, split_into_stages
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
    if config.model.hf_info is not None:
        yield from hf_incompatibilities(config, layout, config.model.hf_info)
    else:
        yield from model_incompatibilities(config, layout, micro_batches)
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
    """Yield what saves activations without the hooks that would move them to the host."""
    key, name = "checkpointing.offload_activations=true", config.model.name
    if config.checkpointing.name == "selective":
        yield f"{key} does not reach what checkpointing=selective keeps: choose none, full, every_n or attention"
    if config.train.compile:
        yield f"{key} does not reach what train.compile=true keeps inside a layer: choose one of the two"
    if config.model.hf_info is not None:
        yield f"{key} needs the decoder layers of this project, and model={name} is a library's: choose false"


def model_incompatibilities(config: RunConfig, layout: Layout, micro_batches: int) -> Iterator[str]:
    """Yield what cannot be done with a model of this project."""
    if config.model.architecture.learned_positions and config.train.seq_len > config.model.context_length:
        yield (
            f"train.seq_len={config.train.seq_len} is more than the model.context_length={config.model.context_length}"
            " learned positions: choose that many or fewer, or a larger model.context_length"
        )
    if layout.tp_enabled or layout.sequence_parallel:
        yield from tensor_parallel_incompatibilities(config, layout)
    if layout.pp_enabled:
        yield from pipeline_incompatibilities(config, layout, micro_batches)


def hf_incompatibilities(config: RunConfig, layout: Layout, hf_info: HFModelInfo) -> Iterator[str]:
    """Yield what cannot be done with a model whose code is a library's."""
    name, tp = config.model.name, layout.tp
    if config.train.seq_len > config.model.context_length:
        yield (
            f"train.seq_len={config.train.seq_len} is more than the {config.model.context_length} tokens of"
            f" model={name}: choose that many or fewer"
        )
    if config.checkpointing.name in ("selective", "attention"):
        yield (
            f"checkpointing={config.checkpointing.name} needs the decoder layers of this project, and model={name} is a"
            " library's: choose none, full or every_n"
        )
    if config.train.loss_chunks > 1:
        chunks = config.train.loss_chunks
        yield f"train.loss_chunks={chunks} needs the head of this project, and model={name} is a library's: choose 1"
    if config.train.compile:
        yield f"train.compile=true is not supported for model={name}, which is a library's: choose false"
    if layout.cp_enabled:
        yield f"strategy.cp={layout.cp} needs the attention of this project, and model={name} is a library's: choose 1"
    if layout.pp_enabled:
        yield f"strategy.pp={layout.pp} needs a model cut into stages, and model={name} is a library's: choose 1"
    if layout.sequence_parallel:
        yield f"strategy.sequence_parallel=true is not part of the plan of model={name}: choose false"
    if tp == 1:
        return
    if not hf_info.tensor_plan:
        model_type = hf_info.config["model_type"]
        yield f"strategy.tp={tp} needs a tensor-parallel plan, and model={name} ({model_type}) brings none: choose 1"
    for path, style in hf_info.tensor_plan.items():
        dimension, shape = SHARD_DIM.get(style), hf_info.shapes.get(f"{path}.weight")
        if dimension is None:
            yield (
                f"strategy.tp={tp}: the tensor-parallel plan of model={name} has {path} as {style}, which is not"
                " supported: choose 1"
            )
            return
        if shape is not None and shape[dimension] % tp:
            yield (
                f"strategy.tp={tp} does not divide dimension {dimension} of {path} in model={name}, which is"
                f" {shape[dimension]}: choose a divisor"
            )
            return
    for key in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config.model, key) % tp:
            size = getattr(config.model, key)
            yield f"strategy.tp={tp} does not divide {key}={size} of model={name}: choose {divisors_text(size)}"
    if config.model.tie_word_embeddings:
        yield f"model.tie_word_embeddings=true of model={name} ties what strategy.tp={tp} cuts apart: choose false"
    if config.model.dropout:
        yield (
            f"model.dropout={config.model.dropout} of model={name} is the library's, which draws other masks on every"
            f" rank of strategy.tp={tp}: choose 0"
        )


def tensor_parallel_incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield the sizes of the model that tensor-parallel ranks cannot divide."""
    tp, model, seq_len = layout.tp, config.model, config.train.seq_len
    # The number of attention heads is a multiple of the key-value heads, so that a divisor of these divides both.
    common_divisor = math.gcd(model.num_key_value_heads, model.intermediate_size)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(model, key)
        if size % tp:
            yield f"strategy.tp={tp} does not divide model.{key}={size}: choose {divisors_text(common_divisor)}"
    # The vocabulary is cut into equal parts, and the last rank has what is left.
    if layout.vocabulary_parallel and (tp - 1) * math.ceil(model.vocab_size / tp) >= model.vocab_size:
        yield (
            f"strategy.tp={tp} leaves a rank without a part of model.vocab_size={model.vocab_size}: choose a smaller"
            " degree"
        )
    if layout.sequence_parallel and tp == 1:
        yield "strategy.sequence_parallel=true needs strategy.tp of 2 or more: choose false"
    if layout.sequence_parallel and seq_len % (tp * layout.cp):
        times = f" x strategy.cp={layout.cp}" if layout.cp_enabled else ""
        yield (
            f"strategy.tp={tp}{times} with strategy.sequence_parallel does not divide train.seq_len={seq_len}: choose a"
            f" multiple of {tp * layout.cp}"
        )


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
        yield f"strategy.virtual_stages=1 interleaves nothing, strategy.schedule={schedule}: choose 2 or more, or 1f1b"
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
        size = layout.micro_batches_per_round(micro_batches)
        yield (
            f"{batch}, which strategy.schedule={schedule} cannot take in rounds of {size}: choose a train.global_batch"
            f" that is a multiple of {p * config.train.micro_batch}"
        )
