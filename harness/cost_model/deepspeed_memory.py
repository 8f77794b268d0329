"""The memory that DeepSpeed's ZeRO takes for gradients and whole parameters beside model state. Imports no torch."""

import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import (
    GroupSizes,
    TransientBuffers,
    group_sizes,
    without_data_parallelism,
)
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_numel
from harness.layout.state_widths import StateWidths


def stage_2_buffers(config: RunConfig, widths: StateWidths, layout: Layout, stage: Stage) -> TransientBuffers:
    """Return the buffers of DeepSpeed's stage 2, which reduces gradients in buckets.

    A gradient that is no larger than a bucket is copied into it and freed. A full bucket is reduced in a flat copy, and
    in mixed precision in an fp32 copy of that. A larger gradient is reduced by itself, in mixed precision from an fp32
    copy of the part of one rank after the other. The gradient of a tied matrix is a sum beside its last summand.
    """
    sizes = group_sizes(config.model, layout, stage, by_parameter=True)
    gradient, buckets = config.precision.compute_bytes, widths.backward_buffer_bytes

    def reduction(elements: float) -> float:
        is_copied = config.precision.is_mixed and elements > widths.reduce_bucket_elements
        return elements * (gradient + config.precision.reduce_bytes / layout.dp_shard * is_copied)

    summand = sizes.first * gradient * config.model.tie_word_embeddings
    in_layer = round(reduction(sizes.layer) - sizes.layer * gradient) + buckets
    in_flush = gradient + config.precision.reduce_bytes * config.precision.is_mixed  # of an element in a bucket
    bucket, is_full = min(sizes.total, widths.reduce_bucket_elements), fills_buckets(sizes, widths, stage)
    return TransientBuffers(
        head_reduction=round(reduction(sizes.head)) + buckets,
        layers=(in_layer,) * len(is_full),
        reductions=tuple(buckets + round(bucket * in_flush * full) for full in is_full),
        end=round(max(reduction(sizes.first) + summand, bucket * in_flush)) + buckets,
    )


def fills_buckets(sizes: GroupSizes, widths: StateWidths, stage: Stage) -> list[bool]:
    """Return whether backward has filled a bucket by the end of each of the layers that observed_layers names."""
    layer = (sizes.total - sizes.embedding - sizes.head) / stage.layers
    return [
        sizes.head + (following + 1) * layer > widths.reduce_bucket_elements
        for following in observed_layers(stage.layers)
    ]


def stage_3_buffers(
    config: RunConfig, widths: StateWidths, layout: Layout, stage: Stage, device: Device
) -> TransientBuffers:
    """Return the buffers of DeepSpeed's stage 3, which gathers parameter by parameter and reduces in buckets.

    The gradients in a bucket are copied to a flat tensor to be reduced. So is a larger gradient that cannot be cut into
    equal parts (coalesced_collectives.py, reduce_scatter_coalesced); in mixed precision it is widened before. Gloo
    copies what it reduces once more.
    """
    sizes = group_sizes(config.model, layout, stage, by_parameter=True)
    whole, gradient, wire = widths.gathered, config.precision.compute_bytes, config.precision.reduce_bytes
    shards, bucket = layout.dp_shard, widths.reduce_bucket_elements
    gloo_copies = int(device == "cpu" and shards > 1)

    def reduction(elements: float) -> float:
        if elements <= bucket:
            return elements * gradient
        return elements * (gradient + wire * (config.precision.is_mixed + (elements % shards > 0) + gloo_copies))

    in_layer = sizes.layer * whole + reduction(sizes.layer) - sizes.layer * gradient
    in_reduction = wire * (1 + gloo_copies)  # of a bucket's elements
    is_full = fills_buckets(sizes, widths, stage)
    return TransientBuffers(
        forward=round(max(sizes.head, sizes.layer) * whole),
        head=round(sizes.head * whole),
        head_reduction=round(reduction(sizes.head)),
        layers=(round(in_layer),) * len(is_full),
        reductions=tuple(round(sizes.layer * whole + bucket * in_reduction * full) for full in is_full),
        end=round(sizes.first * whole + max(reduction(sizes.first), min(sizes.total, bucket) * in_reduction)),
    )


def summed_gradient_bytes(
    config: RunConfig, layout: Layout, widths: StateWidths, gradients: Sequence[int]
) -> list[int]:
    """Return how many bytes of each stage's gradients are there between two micro-batches.

    DeepSpeed's stage 2 then has their sums alone, to which it adds those of a micro-batch at the end of its backward.
    """
    adds_at_end = layout.uses_deepspeed_zero and layout.zero_stage == 2 and widths.gradients > 0
    width = min(widths.gradients, config.precision.accumulate_bytes) if adds_at_end else widths.gradients
    return [size * width // widths.gradients if widths.gradients else size for size in gradients]


def partition_elements(model: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> float:
    """Return the elements of the parameters that lie in a rank's partition of the flat parameters, at least in part.

    It is those of the rank with most of them: DeepSpeed's stage 2 keeps each of their gradients whole.
    """
    return _partition_elements(model, without_data_parallelism(layout), tuple(stages), layout.dp_shard)


@lru_cache(maxsize=256)
def _partition_elements(model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int) -> float:
    sizes = [size for stage in stages for size in local_numel(model, layout, stage).values()]
    part, ends = sum(sizes) / shards, list(accumulate(sizes))
    begins = [end - size for size, end in zip(sizes, ends, strict=True)]
    # A rank within one parameter has no more than the ranks in which that parameter begins and ends.
    borders = {int(end / part) + offset for end in (0.0, *ends) for offset in (-1, 0, 1)}
    ranks = sorted(rank for rank in borders if 0 <= rank < shards)
    return max(
        sum(sizes[bisect.bisect_right(ends, rank * part) : bisect.bisect_left(begins, (rank + 1) * part)])
        for rank in ranks
    )


def gloo_gather_peak(config: RunConfig, layout: Layout, widths: StateWidths, parameters: int) -> dict[str, int]:
    """Return a rank's bytes while DeepSpeed's stages 1 and 2 gather the new parameters, which gloo does in a flat copy.

    The reduction buckets are freed by then, and so are the gradients, but for those of BF16_Optimizer.
    """
    if not layout.uses_deepspeed_zero or layout.zero_stage == 3:
        return {}
    copy = config.precision.compute_bytes * parameters if layout.dp_shard > 1 else 0
    if layout.zero_stage == 1 and widths.gradients > config.precision.accumulate_bytes:
        return {"gradients": widths.gradients * parameters, "buffers": copy}
    return {"buffers": copy - widths.buffer_bytes}


def gradient_copy_bytes(config: RunConfig, layout: Layout, widths: StateWidths, parameters: int) -> int:
    """Return the bytes of this rank's part of the gradients in a flat copy beside the gradients.

    DeepSpeed's stage 1 makes it once they are reduced (stage_1_and_2.py, get_flat_partition); its BF16_Optimizer,
    which holds gradients twice all the time, does not. Stage 3 makes it for the optimizer, of one sub-group after the
    other (stage3.py, _prepare_fp32_grad_for_sub_group).
    """
    width = config.precision.accumulate_bytes
    part = -(-width * parameters // layout.dp_shard)
    if not layout.uses_deepspeed_zero or widths.gradients != width:
        return 0
    if layout.zero_stage == 3:
        return min(part, width * int(config.strategy.options.get("sub_group_size", 1e9)))
    return part if layout.zero_stage == 1 else 0
