"""The memory that DeepSpeed's ZeRO takes for gradients beside model state, and its bucket. Imports no torch."""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.layer_backward import Moment
from harness.cost_model.micro_batch_shape import FP32_BYTES
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import ShardGroups, without_data_parallelism
from harness.layout.layer_spec import layer_branches, layer_matrices
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_sizes
from harness.layout.state_widths import StateWidths

FP64_BYTES = 8


def stage_2_gradient_bytes(
    config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage], device: Device
) -> tuple[int, int]:
    """Return the bytes of a rank's gradients at the end of a backward of stage 2, and between two micro-batches.

    In mixed precision they are the rank's partition in fp32 (stage_1_and_2.py, _build_compact_grad_partition_buffer),
    and until the end of backward the gradients, as it computes them, of those parameters in the partition that are
    larger than a bucket. The embedding's comes last and is among the buffers. The plan for a CPU takes all parameters
    in the partition in the widths' bytes.
    """
    whole = widths.gradients * round(partition_elements(config.model, layout, stages))
    if device == "cpu" or not config.precision.is_mixed:
        return whole, summed_gradient_bytes(config, layout, widths, [whole])[0]
    total = sum(local_sizes(config.model, layout, stages))
    part = config.precision.accumulate_bytes * math.ceil(total / layout.dp_shard)
    return part + large_gradient_bytes(config, layout, widths, stages), part


def large_gradient_bytes(config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage]) -> int:
    """Return the bytes of the gradients in a rank's partition that stage 2 keeps until the end of backward on CUDA.

    These are larger than a bucket, and in mixed precision beside the partition of fp32 sums.
    """
    if not config.precision.is_mixed or layout.offload != "none":
        return 0
    large = partition_elements(config.model, layout, stages, widths.reduce_bucket_elements)
    return config.precision.compute_bytes * round(large)


def holds_gradients_twice(config: RunConfig, layout: Layout, widths: StateWidths) -> bool:
    """Return whether DeepSpeed's BF16_Optimizer holds gradients as backward computes them beside their fp32 sums."""
    return (
        layout.uses_deepspeed_zero and layout.zero_stage == 1 and widths.gradients > config.precision.accumulate_bytes
    )


def widening_peak(config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage]) -> dict[str, int]:
    """Return the bytes beside all gradients while BF16_Optimizer adds them to their sums at the end of a backward.

    It widens a copy of one after the other (bf16_optimizer.py, _update_hp_grad).
    """
    if not holds_gradients_twice(config, layout, widths):
        return {}
    largest = max(local_sizes(config.model, layout, stages))
    return {"temporaries": config.precision.accumulate_bytes * math.ceil(largest)}


def offloaded_reduction_bytes(config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage]) -> int:
    """Return the bytes beside all gradients when stage 1 reduces the first of them under offload, if it is a large one.

    That is the embedding's. They are the rank's partition of the sums in mixed precision
    (_get_compact_grad_partition_slice), and a copy in fp64 for the norm of what the rank has of it
    (copy_grads_in_partition, set_norm_for_param_grad_in_gpu).
    """
    sizes = local_sizes(config.model, layout, stages)
    if not layout.uses_deepspeed_zero or layout.zero_stage != 1 or layout.offload == "none":
        return 0
    part = math.ceil(sum(sizes) / layout.dp_shard)
    copied = min(math.ceil(sizes[0]), part) if sizes[0] > widths.reduce_bucket_elements else 0
    return FP64_BYTES * copied + config.precision.accumulate_bytes * part * config.precision.is_mixed


def norm_peak(
    config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage], between: int
) -> dict[str, int]:
    """Return the bytes of gradients, and of the largest one's copy in fp64, when stages 1 and 2 compute their norm.

    `between` is the bytes of gradients between two micro-batches. In stage 1 the first rank has the most: it has only
    parts of its own gradients, from the embedding on, and all those of other ranks (stage_1_and_2.py,
    get_grad_norm_direct and free_grad_in_param_list).
    """
    is_other = not layout.uses_deepspeed_zero or layout.zero_stage == 3 or layout.offload != "none"
    if is_other or holds_gradients_twice(config, layout, widths):
        return {}
    sizes = list(map(math.ceil, local_sizes(config.model, layout, stages)))
    part, width = math.ceil(sum(sizes) / layout.dp_shard), config.precision.accumulate_bytes
    if layout.zero_stage == 2:
        return {"gradients": between, "temporaries": FP64_BYTES * min(max(sizes), part)}
    begins = [end - size for size, end in zip(sizes, accumulate(sizes), strict=True)]
    own = sum(size for size, begin in zip(sizes, begins, strict=True) if begin < part)
    gradients = width * (sum(sizes) - own + part) if config.precision.is_mixed else width * sum(sizes)
    return {"gradients": gradients, "temporaries": FP64_BYTES * min(sizes[0], part)}


def summed_gradient_bytes(
    config: RunConfig, layout: Layout, widths: StateWidths, gradients: Sequence[int]
) -> list[int]:
    """Return how many bytes of each stage's gradients are there between two micro-batches.

    DeepSpeed's stage 2 then has their sums alone, to which it adds those of a micro-batch at the end of its backward.
    """
    adds_at_end = layout.uses_deepspeed_zero and layout.zero_stage == 2 and widths.gradients > 0
    width = min(widths.gradients, config.precision.accumulate_bytes) if adds_at_end else widths.gradients
    return [size * width // widths.gradients if widths.gradients else size for size in gradients]


def partition_elements(
    model: ModelConfig, layout: Layout, stages: Sequence[Stage], smallest: int | None = None
) -> float:
    """Return the elements of the parameters that lie in a rank's partition of the flat parameters, at least in part.

    It is those of the rank with most of them: DeepSpeed's stage 2 keeps each of their gradients whole. Only those with
    more elements than `smallest` count if it is given, and not the embedding.
    """
    return _fullest_partition(model, without_data_parallelism(layout), tuple(stages), layout.dp_shard, smallest)[0]


def fullest_rank(config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage]) -> int:
    """Return a rank that no other one exceeds where DeepSpeed divides all parameters as one tensor: stages 1 and 2.

    Stage 2 keeps gradients whole, and allocates the partition of the last ranks first. Stage 1 under offload reduces
    all gradients after backward, of which the first rank has the first.
    """
    if layout.zero_stage == 1:
        return 0
    if layout.offload != "none":
        return layout.world_size - layout.tp
    smallest = widths.reduce_bucket_elements if config.precision.is_mixed else None
    shared = without_data_parallelism(layout)
    return _fullest_partition(config.model, shared, tuple(stages), layout.dp_shard, smallest)[1] * layout.tp


@lru_cache(maxsize=256)
def _fullest_partition(
    model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int, smallest: int | None
) -> tuple[float, int]:
    """Return the elements of partition_elements, and the last shard that has as many."""
    sizes = local_sizes(model, layout, stages)
    part, ends = sum(sizes) / shards, list(accumulate(sizes))
    begins = [end - size for size, end in zip(sizes, ends, strict=True)]
    # A rank within one parameter has no more than the ranks in which that parameter begins and ends.
    borders = {int(end / part) + offset for end in (0.0, *ends) for offset in (-1, 0, 1)}
    ranks = sorted(rank for rank in borders if 0 <= rank < shards)
    counted = sizes if smallest is None else [0.0, *(size if size > smallest else 0.0 for size in sizes[1:])]
    return max(
        (sum(counted[bisect.bisect_right(ends, rank * part) : bisect.bisect_left(begins, (rank + 1) * part)]), rank)
        for rank in ranks
    )


def kept_host_gradient_bytes(
    config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage], even_bytes: int
) -> int:
    """Return the bytes of a rank's gradients on the host; `even_bytes` is those of an even share of them.

    Stage 2 sums each parameter that lies in its partition whole, beside the flat gradients that AdamW reads.
    """
    if layout.zero_stage != 2 or widths.host_gradients <= FP32_BYTES:
        return even_bytes
    flat = even_bytes * FP32_BYTES // widths.host_gradients
    return flat + (widths.host_gradients - FP32_BYTES) * round(partition_elements(config.model, layout, stages))


def gloo_gather_peak(config: RunConfig, layout: Layout, widths: StateWidths, parameters: int) -> dict[str, int]:
    """Return a rank's bytes while DeepSpeed's stages 1 and 2 gather the new parameters, which gloo does in a flat copy.

    The reduction buckets are freed by then, and so are the gradients on the device, but for those of BF16_Optimizer.
    """
    if not layout.uses_deepspeed_zero or layout.zero_stage == 3:
        return {}
    copy = config.precision.compute_bytes * parameters if layout.dp_shard > 1 else 0
    if holds_gradients_twice(config, layout, widths):
        return {"gradients": widths.gradients * parameters, "buffers": copy}
    return {"buffers": copy - widths.buffer_bytes * (layout.offload == "none")}


def gradient_copy_bytes(config: RunConfig, layout: Layout, widths: StateWidths, parameters: int, device: Device) -> int:
    """Return the bytes of this rank's part of the gradients in a flat copy beside the gradients.

    DeepSpeed's stages 1 and 2 make it once they are reduced (stage_1_and_2.py, get_flat_partition and step); its
    BF16_Optimizer, which holds gradients twice all the time, does not, nor does stage 2 where it sums gradients in a
    flat tensor. On a CPU a copy of gloo's is larger than that of stage 2. Stage 3 makes it for the optimizer, of one
    sub-group after the other (stage3.py, _prepare_fp32_grad_for_sub_group).
    """
    width = config.precision.accumulate_bytes
    part = -(-width * parameters // layout.dp_shard)
    if not layout.uses_deepspeed_zero or widths.gradients != width:
        return 0
    if layout.zero_stage == 3:
        return min(part, width * int(config.strategy.options.get("sub_group_size", 1e9)))
    is_copied = layout.zero_stage == 1 or (device == "cuda" and not config.precision.is_mixed)
    return part if is_copied else 0


@dataclass(frozen=True)
class GradientBucket:
    """The way of gradients to their shards, one after another; sizes are in elements."""

    limit: int
    gradient: int  # bytes of an element as backward computes it
    small: int  # elements of the gradient of a norm or a bias
    has_biases: bool  # whether the gradient of every matrix is followed by a bias's

    def is_large(self, size: int) -> bool:
        """Return whether a gradient does not fit the bucket."""
        return size > self.limit

    def flush(self, content: int, size: int) -> int:
        """Return what is reduced when a gradient of this size arrives at a bucket with this content."""
        return content if content + size > self.limit else 0

    def add(self, content: int, size: int) -> int:
        """Return the bucket's content after this gradient has arrived."""
        return size if self.flush(content, size) else content + size

    def waiting_bytes(self, content: int) -> int:
        """Return the bytes of the gradient that waits outside the bucket."""
        return content * self.gradient if self.is_large(content) else 0


class Arrival(NamedTuple):
    """A moment of a layer's backward, and what it finds in the bucket."""

    moment: Moment
    content: int  # elements that the bucket has when the moment begins
    flushed: tuple[int, ...]  # elements that are reduced because a gradient arrives, one after the other


def arrivals(bucket: GradientBucket, moments: Sequence[Moment], content: int) -> Iterator[Arrival]:
    """Yield the moments of a layer's backward, which it enters with this content of the bucket.

    A norm's gradient follows that of the last matrix that reads its result.
    """
    for moment in moments:
        if not moment.is_accumulation:
            yield Arrival(moment, content, ())
            continue
        before, flushed = content, [bucket.flush(content, moment.computed)]
        content = bucket.add(content, moment.computed)
        if bucket.has_biases or not moment.is_followed_by_matrix:
            flushed.append(bucket.flush(content, bucket.small))
            content = bucket.add(content, bucket.small)
        yield Arrival(moment, before, tuple(flushed))


class LayerArrivals(NamedTuple):
    """The bucket in the backward of a layer."""

    content: int  # elements that it has when backward enters the layer
    most_flushed: int  # the most elements that are reduced at a time


@lru_cache(maxsize=1024)
def layer_arrivals(model: ModelConfig, groups: ShardGroups, bucket: GradientBucket) -> list[LayerArrivals]:
    """Return the bucket in the backward of all layers, the last one first, and of what lies before the layers."""
    tail = [groups.head.largest] if groups.head.elements else []
    content = 0
    for size in (*tail, bucket.small):
        content = bucket.add(content, size)
    sizes, layers = layer_gradient_sizes(model, groups), []
    for _ in range(groups.layers):
        before, flushed = content, 0
        for size in sizes:
            flushed = max(flushed, bucket.flush(content, size))
            content = bucket.add(content, size)
        layers.append(LayerArrivals(before, flushed))
    return [*layers, LayerArrivals(content, 0)]


def rising_layers(sizes: Sequence[int]) -> list[int]:
    """Return the layers with a larger size than all before them, but for those that observed_layers names.

    `sizes` are those of layers in the order of backward, which has less and less activations, so that no other layer of
    the middle can be the worst.
    """
    layers, most = [], 0
    for following, size in enumerate(sizes):
        if size > most:
            most = size
            layers.append(following)
    return sorted(set(layers) - set(observed_layers(len(sizes))))


def layer_gradient_sizes(model: ModelConfig, groups: ShardGroups) -> list[int]:
    """Return the elements of a layer's gradients in the order in which backward computes them."""
    hidden, sizes = model.hidden_size, list[int]()
    elements = {matrix.name: matrix.elements for matrix in layer_matrices(model)}
    for branch in reversed(layer_branches(model)):
        sizes += [elements[operator.matrix] for operator in reversed(branch.operators) if operator.matrix]
        sizes.append(hidden)  # of the norm
    divided = groups.layer.elements / sum(sizes)
    return [round(size * divided) if size > hidden else size for size in sizes]
