"""The memory of DeepSpeed's stages 2 and 3 for whole parameters and for gradients on their way to shards. No torch.

Stage 3 gathers parameters module by module, and reduces gradients in buckets (deepspeed/runtime/zero/stage3.py). A
gradient that fits is copied into the bucket, in the width of the reduction, and freed. A larger one is reduced by
itself, but only when the next gradient arrives, and is cast to that width before. Gradients are then copied into a flat
tensor unless it is a single one of equal parts (coalesced_collectives.py), and gloo copies that once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.config.schema import Device, RunConfig
from harness.cost_model.deepspeed_memory import (
    FP64_BYTES,
    GradientBucket,
    arrivals,
    large_gradient_bytes,
    layer_arrivals,
    rising_layers,
)
from harness.cost_model.layer_backward import Moment
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import TransientBuffers, shard_groups
from harness.cost_model.whole_parameters import coordinator_options, whole_parameters
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths


@dataclass(frozen=True)
class Stage2Reduction:
    """The copies that DeepSpeed's stage 2 makes of gradients to reduce them to the ranks that own them.

    In mixed precision it copies them in fp32, a large one a rank's part after another. One that lies in the partition
    of a single rank is copied whole; the plan for a CPU takes it to be divided evenly. Where a parameter lies in two
    partitions, the parts of a bucket that one rank owns are not next to each other, and are put together before
    (stage_1_and_2.py, average_tensor and allreduce_no_retain). Under offload it then computes the norm of each
    parameter's gradient in fp64 (set_norm_for_param_grad_in_gpu).
    """

    bucket: GradientBucket
    shards: int
    partition: float  # elements
    wire: int  # bytes of an element of the fp32 copy; 0 where gradients are reduced as they are
    norm: int  # bytes of an element of the copy for its norm; 0 without offload
    largest_in_bucket: int  # elements of the largest gradient of a layer that is no larger than the bucket
    divides_evenly: bool  # whether a large gradient has a part on every rank
    allocates_first: bool  # whether the rank's partition is allocated before the first reduction, not behind it

    def copied_bytes(self, content: int, arrived: int) -> int:
        """Return the bytes of the copies of so many elements, the last of all that have arrived."""
        if self.bucket.is_large(content):
            part = content / self.shards if self.divides_evenly else min(content, self.partition)
            return round(max(part * self.wire, (content if self.divides_evenly else part) * self.norm))
        is_divided = content > 0 and int((arrived - content) / self.partition) < int((arrived - 1) / self.partition)
        in_norm = min(content, self.largest_in_bucket) * self.norm
        return max(content * (self.wire + self.bucket.gradient * is_divided), in_norm)


@dataclass(frozen=True)
class Stage2Layer:
    """One of the layers that observed_layers names, on its way through the backward of DeepSpeed's stage 2."""

    bucket: GradientBucket
    bucket_bytes: int  # allocated, from the first gradient on
    reduction: Stage2Reduction
    arrived: int  # the elements of all gradients before the layer's
    content: int  # of the bucket when backward enters the layer
    is_partition_allocated: bool  # whether gradients were reduced before

    def buffer_bytes(self, moments: Sequence[Moment], new_gradients: int) -> list[tuple[int, int]]:
        """Return the bytes at each of the moments of the layer's backward: this rank's gradients, and buffers."""
        is_allocated, arrived, sizes = self.is_partition_allocated, self.arrived, []
        for moment, content, flushed in arrivals(self.bucket, moments, self.content):
            ends = (arrived, arrived + moment.computed)
            copies = [self.reduction.copied_bytes(size, end) for size, end in zip(flushed, ends, strict=False)]
            copied, arrived = max(copies, default=0), arrived + moment.computed * moment.is_accumulation
            present = self.bucket_bytes + self.bucket.waiting_bytes(content) + moment.computed * self.bucket.gradient
            is_reducing = is_allocated or (self.reduction.allocates_first and any(flushed))
            reducing, reduced = (new_gradients * is_reducing, present + copied), (new_gradients, present)
            is_allocated = is_allocated or any(flushed)
            sizes.append(max(reducing, reduced, key=sum) if is_allocated else reducing)
        return sizes


def gradient_bucket(config: RunConfig, widths: StateWidths) -> GradientBucket:
    """Return the bucket of a run."""
    model, gradient = config.model, config.precision.compute_bytes
    return GradientBucket(widths.reduce_bucket_elements, gradient, model.hidden_size, model_profile(model).has_biases)


def stage_2_buffers(
    config: RunConfig, widths: StateWidths, layout: Layout, stage: Stage, device: Device
) -> TransientBuffers:
    """Return the buffers of DeepSpeed's stage 2, which reduces gradients in buckets.

    A gradient that is no larger than a bucket is copied into it and freed. A larger one is reduced by itself, when the
    next one arrives. The gradients of a tied matrix are summed first. The first reduction allocates this rank's
    partition of the gradients: in mixed precision before it copies what it reduces (_get_compact_grad_partition_slice),
    else behind it (copy_grads_in_partition).
    """
    groups = shard_groups(config.model, layout, stage)
    gradient, buckets = config.precision.compute_bytes, widths.backward_buffer_bytes
    bucket = gradient_bucket(config, widths)
    wire = config.precision.reduce_bytes * config.precision.is_mixed
    norm = FP64_BYTES * (layout.offload != "none")
    in_bucket = 0 if bucket.is_large(groups.layer.largest) else groups.layer.largest
    partition = groups.elements / layout.dp_shard
    on_cpu, is_mixed = device == "cpu", config.precision.is_mixed
    reduction = Stage2Reduction(
        bucket, layout.dp_shard, partition, wire, norm, in_bucket, on_cpu, allocates_first=is_mixed and not on_cpu
    )
    arrivals_of_layers = layer_arrivals(config.model, groups, bucket)
    head, first = groups.head.largest, groups.embedding.elements or groups.root.elements
    large_head = head * bucket.is_large(head)

    def layer_buffers(following: int) -> Stage2Layer:
        return Stage2Layer(
            bucket,
            buckets,
            reduction,
            head + following * groups.layer.elements,
            arrivals_of_layers[following].content,
            head + following * groups.layer.elements > bucket.limit,
        )

    observed = tuple(map(layer_buffers, observed_layers(groups.layers)))
    middle = rising_layers([layer.most_flushed for layer in arrivals_of_layers[:-1]])
    at_end = stage_2_end(config, reduction, arrivals_of_layers[-1].content, first, groups.elements, device)
    return TransientBuffers(
        head_reduction=large_head * gradient + reduction.copied_bytes(large_head, head) + buckets,
        reduces_head=large_head > 0,
        later=0 if on_cpu else large_gradient_bytes(config, layout, widths, [stage]),
        layers=(buckets,) * len(observed),
        observed=observed,
        middle=tuple((following, layer_buffers(following)) for following in middle),
        last_gradient=at_end.summed + buckets,
        reduces_before_end=head + groups.layers * groups.layer.elements > bucket.limit,
        first_reduction=at_end.first_reduction + buckets,
        end=at_end.reduced + buckets,
    )


class Stage2End(NamedTuple):
    """The bytes at the end of a backward of stage 2, without the buckets and the rank's own gradients."""

    summed: int  # when the last gradient is computed, and summed if its matrix is tied
    first_reduction: int  # in a reduction after which the rank's gradients are allocated
    reduced: int  # in the other reductions, and behind all


def stage_2_end(
    config: RunConfig, reduction: Stage2Reduction, content: int, last: int, total: int, device: Device
) -> Stage2End:
    """Return the bytes when the last gradient, of so many elements of all, arrives at a bucket with this content.

    On CUDA the gradients of a tied matrix are summed beside both of them, on a CPU one is added to the other. There
    gloo's threads refer to the copies that they have reduced while the rank's gradients are allocated.
    """
    bucket, is_tied = reduction.bucket, config.model.tie_word_embeddings
    gradient, flushed, at_last = last * bucket.gradient, bucket.flush(content, last), bucket.add(content, last)
    arriving = gradient + reduction.copied_bytes(flushed, total - last)
    at_end = bucket.waiting_bytes(at_last) + reduction.copied_bytes(at_last, total)
    summed = gradient * (1 + is_tied * (1 + (device == "cuda")))
    if device == "cpu":
        return Stage2End(0, 0, max(gradient * is_tied + arriving, at_end))
    if reduction.allocates_first or total - last > bucket.limit:
        return Stage2End(summed, 0, max(arriving, at_end))
    return Stage2End(summed, arriving, max(gradient, at_end)) if flushed else Stage2End(summed, at_end, 0)


@dataclass(frozen=True)
class GatheredParameters:
    """The bytes of whole parameters in a layer's backward: when each matrix's gradient is computed, and else."""

    computing: tuple[int, ...]
    accumulating: tuple[int, ...]
    between: tuple[int, ...]

    def at(self, moment: Moment, matrices_behind: int) -> int:
        """Return the bytes at a moment of the backward, which has left so many matrices."""
        if not moment.computed:
            return self.between[matrices_behind]
        return (self.accumulating if moment.is_accumulation else self.computing)[matrices_behind]


@dataclass(frozen=True)
class Stage3Reduction:
    """The copies that are made of gradients to reduce them."""

    bucket: GradientBucket
    shards: int
    wire: int  # bytes of an element as it is reduced
    backend_copies: bool  # whether the backend copies what it reduces, as gloo does

    def copied_bytes(self, content: int) -> int:
        """Return the bytes of the copies while so many elements are reduced."""
        is_large = self.bucket.is_large(content)  # what is in the bucket has the width of the reduction already
        copies = is_large * (self.wire != self.bucket.gradient) + self.backend_copies
        copies += not (is_large and content % self.shards == 0)
        return content * self.wire * copies


@dataclass(frozen=True)
class Stage3Layer:
    """One of the layers that observed_layers names, on its way through backward."""

    reduction: Stage3Reduction
    gathered: GatheredParameters
    content: int  # of the bucket when backward enters the layer

    def buffer_bytes(self, moments: Sequence[Moment], new_gradients: int) -> list[tuple[int, int]]:
        """Return the bytes at each of the moments of the layer's backward: 0, and those of parameters and gradients."""
        bucket, sizes, matrices_behind = self.reduction.bucket, [], 0
        for moment, content, flushed in arrivals(bucket, moments, self.content):
            reduced = bucket.waiting_bytes(content)
            reduced += self.reduction.copied_bytes(flushed[0]) if flushed else 0
            # What the gradient of a bias flushes is the matrix's own.
            reduced = max(reduced, *map(self.reduction.copied_bytes, flushed[1:]), 0)
            whole = self.gathered.at(moment, matrices_behind)
            matrices_behind += moment.is_accumulation
            sizes.append((0, whole + moment.computed * bucket.gradient + reduced))
        return sizes


def stage_3_buffers(
    config: RunConfig, widths: StateWidths, layout: Layout, stage: Stage, device: Device
) -> TransientBuffers:
    """Return the buffers of a pass through a stage under DeepSpeed's stage 3."""
    groups, width = shard_groups(config.model, layout, stage), widths.gathered
    precision, backend_copies = config.precision, device == "cpu"
    bucket = gradient_bucket(config, widths)
    reduction = Stage3Reduction(bucket, layout.dp_shard, precision.reduce_bytes, backend_copies)
    options = coordinator_options(config.strategy.options)
    whole = whole_parameters(config.model, config.checkpointing, options, backend_copies)
    arrivals_of_layers = layer_arrivals(config.model, groups, bucket)

    def layer_buffers(following: int) -> Stage3Layer:
        return Stage3Layer(
            reduction,
            GatheredParameters(*(tuple(number * width for number in each) for each in whole.layers[-1 - following])),
            arrivals_of_layers[following].content,
        )

    observed = tuple(map(layer_buffers, observed_layers(groups.layers)))
    most_whole = (max(*layer.computing, *layer.between) * width for layer in reversed(whole.layers))
    most_copied = (reduction.copied_bytes(layer.most_flushed) for layer in arrivals_of_layers[:-1])
    middle = rising_layers([sum(sizes) for sizes in zip(most_whole, most_copied, strict=True)])
    embedding, is_tied = groups.embedding.elements or groups.root.elements, config.model.tie_word_embeddings
    head, before_last = groups.head.largest, arrivals_of_layers[-1].content
    reduced_head = head * bucket.gradient + reduction.copied_bytes(head) if bucket.is_large(head) else 0
    return TransientBuffers(
        forward=max(whole.at_head, whole.forward[-1]) * width,
        forward_layers=tuple(elements * width for elements in whole.forward),
        loss=(whole.in_head if config.train.loss_chunks > 1 else whole.loss) * width,
        entering=whole.entering_head * width,
        head=whole.in_head * width,
        head_reduction=whole.behind_head * width + reduced_head,
        layers=(whole.behind_head * width,) * len(observed),
        observed=observed,
        middle=tuple((following, layer_buffers(following)) for following in middle),
        last_gradient=whole.at_embedding * width + embedding * bucket.gradient * (1 + is_tied),
        end=whole.at_embedding * width + last_gradient_bytes(embedding, is_tied, reduction, before_last, device),
    )


def last_gradient_bytes(embedding: int, is_tied: bool, reduction: Stage3Reduction, content: int, device: Device) -> int:
    """Return the bytes of the gradients of an embedding of so many elements, and of the copies to reduce their sum.

    `content` is what the bucket has before. The gradients of a tied matrix are summed beside both of them, but on a CPU
    one is added to the other (torch/csrc/autograd/input_buffer.cpp).
    """
    bucket, gradient = reduction.bucket, embedding * reduction.bucket.gradient
    flushed, last = bucket.flush(content, embedding), bucket.add(content, embedding)
    summed = gradient * (1 + is_tied * (1 + (device == "cuda")))
    waits = gradient * bucket.is_large(embedding)
    return max(summed, gradient + reduction.copied_bytes(flushed), waits + reduction.copied_bytes(last))
