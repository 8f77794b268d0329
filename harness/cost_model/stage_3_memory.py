"""The memory of DeepSpeed's stage 3 for gathered parameters and for gradients on their way to shards. Imports no torch.

It gathers parameters module by module, and reduces gradients in buckets (deepspeed/runtime/zero/stage3.py). A gradient
that fits is copied into the bucket, in the width of the reduction, and freed. A larger one is reduced by itself, but
only when the next gradient arrives, and is cast to that width before. Gradients are then copied into a flat tensor
unless it is a single one of equal parts (coalesced_collectives.py), and gloo copies that once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.schema import Device, RunConfig
from harness.cost_model.gradient_bucket import GradientBucket, arrivals, bucket_contents
from harness.cost_model.layer_backward import Moment
from harness.cost_model.shard_groups import shard_groups
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import TransientBuffers
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths

DEFAULT_REUSE_DISTANCE = 1e9  # elements, see stage3_max_reuse_distance

DEFAULT_PREFETCH_ELEMENTS = 5e7  # see stage3_prefetch_bucket_size


@dataclass(frozen=True)
class GatheredParameters:
    """The parameters that are whole in backward, in elements of one layer's matrices."""

    width: int  # bytes of a gathered element
    stay_whole: bool  # whether parameters stay whole from forward until their backward
    references_second_forward: bool  # whether matrices of a second forward stay until they are used

    def in_layer(self, moment: Moment, matrices: int, before: int) -> int:
        """Return the bytes at a moment of a layer's backward; `before` is the elements of what forward ran before it.

        Autograd keeps no parameter that a module released, but the second forward of a checkpointed part saves views
        of the gathered matrices. Each is then freed once it has served, and gathered anew for its backward, but for
        the last matrix, which backward gathers before the second forward.
        """
        left = matrices - moment.weights
        if self.stay_whole:
            return (before + left) * self.width
        if not self.references_second_forward:
            return moment.computed * self.width
        if moment.weights == 0:
            return left * self.width
        return (left - moment.computed * moment.is_accumulation + moment.computed) * self.width


@dataclass(frozen=True)
class Reduction:
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

    reduction: Reduction
    gathered: GatheredParameters
    content: int  # of the bucket when backward enters the layer
    before: int  # the elements of the parameters that forward used before this layer
    small: int  # the elements of the gradient of a norm or a bias
    has_biases: bool

    def buffer_bytes(self, moments: Sequence[Moment], new_gradients: int) -> list[tuple[int, int]]:
        """Return the bytes at each of the moments of the layer's backward: 0, and those of parameters and gradients."""
        bucket, sizes = self.reduction.bucket, []
        matrices = moments[-1].weights + moments[-1].computed
        for moment, content, flushed in arrivals(bucket, moments, self.content, self.small, self.has_biases):
            reduced = bucket.waiting_bytes(content)
            reduced += self.reduction.copied_bytes(flushed[0]) if flushed else 0
            # What the gradient of a bias flushes is the matrix's own.
            reduced = max(reduced, *map(self.reduction.copied_bytes, flushed[1:]), 0)
            whole = self.gathered.in_layer(moment, matrices, self.before)
            sizes.append((0, whole + moment.computed * bucket.gradient + reduced))
        return sizes


def stage_3_buffers(
    config: RunConfig, widths: StateWidths, layout: Layout, stage: Stage, device: Device
) -> TransientBuffers:
    """Return the buffers of a pass through a stage under DeepSpeed's stage 3."""
    groups, whole = shard_groups(config.model, layout, stage), widths.gathered
    options, precision = config.strategy.options, config.precision
    bucket = GradientBucket(widths.reduce_bucket_elements, precision.compute_bytes)
    reduction = Reduction(bucket, layout.dp_shard, precision.reduce_bytes, device == "cpu")
    stays = float(options.get("stage3_max_reuse_distance", DEFAULT_REUSE_DISTANCE)) >= groups.elements
    contents = bucket_contents(config.model, groups, bucket)
    embedding = groups.embedding.elements or groups.root.elements
    head, layer = groups.head.largest or groups.root.largest, groups.layer
    observed = tuple(
        Stage3Layer(
            reduction,
            GatheredParameters(
                whole, stays, config.checkpointing.recomputes_layer(stage.layer_indices[-1 - following])
            ),
            contents[following],
            embedding + (groups.layers - following - 1) * layer.elements,
            config.model.hidden_size,
            model_profile(config.model).has_biases,
        )
        for following in observed_layers(groups.layers)
    )
    copies = 1 + (device == "cpu")
    # What is gathered ahead of use lies in a flat tensor until all of it has been used.
    prefetched = float(options.get("stage3_prefetch_bucket_size", DEFAULT_PREFETCH_ELEMENTS))
    ahead = groups.elements * (groups.elements <= prefetched) if device == "cpu" else min(groups.elements, prefetched)
    all_whole = groups.elements * whole
    in_head = all_whole if stays else head * whole
    at_end = embedding * whole + embedding * bucket.gradient
    last = bucket.add(contents[groups.layers], embedding)
    flushed = bucket.flush(contents[groups.layers], embedding)
    is_tied = not groups.embedding.elements
    summand = groups.root.elements * bucket.gradient * is_tied * (device == "cuda")  # until the gradients are summed
    at_end += max(reduction.copied_bytes(flushed), reduction.copied_bytes(last), summand)
    reduced_head = reduction.copied_bytes(head) if bucket.is_large(head) else 0
    return TransientBuffers(
        forward=all_whole + round(ahead * whole) if stays else max(head, layer.largest) * whole * copies,
        loss=all_whole if stays else head * whole * (config.train.loss_chunks > 1),
        entering=all_whole if stays else head * whole * copies,
        head=in_head,
        head_reduction=in_head * stays + head * bucket.gradient + reduced_head,
        layers=((all_whole - groups.head.elements * whole) * stays,) * len(observed),
        observed=observed,
        end=at_end,
    )
