"""What a rank holds beside model state and activations to communicate. Imports no torch."""

from harness.config import ModelConfig, RunConfig
from harness.engines import Widths
from harness.layout import Layout
from harness.plan.activations import WIDTH_BYTES
from harness.sizes import (
    elements,
    embedding_shapes,
    group_parameter_counts,
    head_shapes,
    layer_parameter_count,
    parameter_count,
)


def buffer_tensors(config: RunConfig, layout: Layout, widths: Widths) -> dict[str, int]:
    """Bytes of what a rank holds to communicate, by name."""
    total, groups = parameter_count(config.model), group_parameter_counts(config.model)
    compute = WIDTH_BYTES[config.precision.compute]
    buffers: dict[str, int] = {"engine": widths.buffer_bytes}
    if layout.data_parallel == "ddp":
        # DDP's buckets are as large as the model in its own width. With views fp32 gradients lie in them; in mixed
        # precision they are there beside the fp32 gradients.
        copies = int(config.precision.mixed) + int(not bucket_views(config))
        buffers["ddp_buckets"] = copies * total * compute
    if layout.data_parallel == "fsdp" and layout.zero_stage < 3:  # whole from forward to the end of backward
        buffers["gathered"] = (total + groups[0]) * widths.gathered
    elif layout.zero_stage == 3:
        buffers["gathered"] = gathered_parameter_count(config.model) * widths.gathered
    return buffers


def gathered_parameter_count(model: ModelConfig) -> int:
    """Parameters whole at once when they are sharded: a group in use beside the gather buffer of one group.

    A tied embedding serves first and last, so fully_shard keeps it gathered all the way; DeepSpeed needs less.
    """
    groups = group_parameter_counts(model)
    if not model.tie_word_embeddings:
        return sum(groups[:2])
    layer, root = layer_parameter_count(model), elements(embedding_shapes(model)) + elements(head_shapes(model))
    return root + max(root, 2 * layer)


def unreduced_bytes(config: RunConfig, layout: Layout) -> int:
    """Where gradients are sharded: the largest group's whole gradient and its flat copy on the wire."""
    if layout.shards("gradients") == 1:
        return 0
    widths = WIDTH_BYTES[config.precision.compute] + WIDTH_BYTES[config.precision.reduce]
    return group_parameter_counts(config.model)[0] * widths


def bucket_views(config: RunConfig) -> bool:
    return bool(config.strategy.options.get("gradient_as_bucket_view", False))


def gradients_outlive_step(config: RunConfig, layout: Layout) -> bool:
    """Whether memory of gradients is held when a step begins."""
    if layout.data_parallel == "ddp":
        return bucket_views(config) and not config.precision.mixed
    return layout.data_parallel != "fsdp" and layout.dp > 1
