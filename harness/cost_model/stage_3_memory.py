"""The memory of DeepSpeed's stage 3 for gathered parameters and for gradients on their way to shards. Imports no torch.

It gathers parameters module by module, and reduces gradients in buckets (deepspeed/runtime/zero/stage3.py). A gradient
that fits is copied into the bucket, in the width of the reduction, and freed. A larger one is reduced by itself, but
only when the next gradient arrives, and is cast to that width before. Gradients are then copied into a flat tensor
unless it is a single one of equal parts (coalesced_collectives.py), and gloo copies that once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.schema import Device, RunConfig
from harness.cost_model.gradient_bucket import GradientBucket, arrivals, layer_arrivals, rising_layers
from harness.cost_model.layer_backward import Moment
from harness.cost_model.shard_groups import shard_groups
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import TransientBuffers
from harness.cost_model.whole_parameters import LayerElements, coordinator_options, whole_parameters
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths


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
    small: int  # the elements of the gradient of a norm or a bias
    has_biases: bool

    def buffer_bytes(self, moments: Sequence[Moment], new_gradients: int) -> list[tuple[int, int]]:
        """Return the bytes at each of the moments of the layer's backward: 0, and those of parameters and gradients."""
        bucket, sizes, matrices_behind = self.reduction.bucket, [], 0
        for moment, content, flushed in arrivals(bucket, moments, self.content, self.small, self.has_biases):
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
    bucket = GradientBucket(widths.reduce_bucket_elements, precision.compute_bytes)
    reduction = Reduction(bucket, layout.dp_shard, precision.reduce_bytes, backend_copies)
    options = coordinator_options(config.strategy.options)
    whole = whole_parameters(config.model, config.checkpointing, options, backend_copies)
    arrivals_of_layers = layer_arrivals(config.model, groups, bucket)

    def layer_buffers(following: int) -> Stage3Layer:
        return Stage3Layer(
            reduction,
            gathered_parameters(whole.layers[-1 - following], width),
            arrivals_of_layers[following].content,
            config.model.hidden_size,
            model_profile(config.model).has_biases,
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


def gathered_parameters(layer: LayerElements, width: int) -> GatheredParameters:
    """Return the bytes of a layer's whole parameters, of so many bytes an element."""
    return GatheredParameters(*(tuple(number * width for number in numbers) for numbers in layer))


def last_gradient_bytes(embedding: int, is_tied: bool, reduction: Reduction, content: int, device: Device) -> int:
    """Return the bytes of the gradients of an embedding of so many elements, and of the copies to reduce their sum.

    `content` is what the bucket has before. The gradients of a tied matrix are summed beside both of them, but on a CPU
    one is added to the other (torch/csrc/autograd/input_buffer.cpp).
    """
    bucket, gradient = reduction.bucket, embedding * reduction.bucket.gradient
    flushed, last = bucket.flush(content, embedding), bucket.add(content, embedding)
    summed = gradient * (1 + is_tied * (1 + (device == "cuda")))
    waits = gradient * bucket.is_large(embedding)
    return max(summed, gradient + reduction.copied_bytes(flushed), waits + reduction.copied_bytes(last))
