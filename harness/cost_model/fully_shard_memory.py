"""The memory that fully_shard takes for whole parameters and for gradients on their way to shards. Imports no torch."""

from dataclasses import dataclass

from harness.config.schema import Device, RunConfig
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import GroupSizes, TransientBuffers, group_sizes
from harness.layout.layout import Layout
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths


def resharded_buffers(
    config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage, device: Device
) -> TransientBuffers:
    """Return the buffers of fully_shard that gathers a group for forward and again for backward.

    Beside the group in use there is the flat result of a gather: in forward that of the same group, in backward that of
    the next one, which is prefetched. The group of tied weights is the root's, whole from its first to its last use.
    """
    groups, sizes = (
        group_sizes(config.model, layout, stage, by_parameter=False),
        element_bytes(config, layout, widths, device),
    )
    tied, gathered = config.model.tie_word_embeddings, sizes.gathered
    root = groups.head * (gathered + sizes.gradient) if tied else 0  # the head's gradient waits for the embedding's
    last_reduced = groups.first * sizes.wire * sizes.accumulates

    def in_layer(following: int) -> int:
        prefetched = groups.layer if following < stage.layers - 1 else groups.embedding
        reduced = groups.layer if following else groups.head * (not tied)
        return round(root + (groups.layer + prefetched) * gathered + reduced * sizes.wire)

    def in_reduction(following: int) -> int:
        prefetched = groups.layer if following < stage.layers - 1 else groups.embedding
        return round(root + 2 * prefetched * gathered + groups.layer * (sizes.wire + sizes.gloo_copy))

    return TransientBuffers(
        forward=round(2 * max(groups.head, groups.layer) * gathered + last_reduced),
        loss=round(last_reduced),
        head=round((groups.head + groups.layer) * gathered + last_reduced),
        head_reduction=0 if tied else round(groups.layer * gathered + groups.head * sizes.reduction),
        layers=tuple(map(in_layer, observed_layers(stage.layers))),
        reductions=tuple(map(in_reduction, observed_layers(stage.layers))) if sizes.gloo_copy else (),
        end=round(end_bytes(groups, sizes, tied)),
    )


def whole_buffers(
    config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage, device: Device, other_elements: float
) -> TransientBuffers:
    """Return the buffers of fully_shard that keeps parameters whole from the first forward to the last backward.

    `other_elements` is the number of whole elements in the rank's other stages. The last backward frees each group as
    it goes; where it is the only one of a step, there is none that keeps them.
    """
    groups, sizes = (
        group_sizes(config.model, layout, stage, by_parameter=False),
        element_bytes(config, layout, widths, device),
    )
    tied, gathered, frees = config.model.tie_word_embeddings, sizes.gathered, not sizes.accumulates
    whole = (groups.total + other_elements) * gathered
    result = max(groups.head, groups.layer) * gathered if layout.shard_count("parameters") > 1 else 0
    last_reduced = groups.first * sizes.wire * sizes.accumulates
    freed_head = groups.head * gathered * (frees and not tied)
    waiting = groups.head * sizes.gradient * tied

    def in_layer(following: int) -> int:
        freed_layers = following * groups.layer * gathered * frees
        reduced = groups.layer if following else groups.head * (not tied)
        return round(whole - freed_head - freed_layers + waiting + reduced * sizes.wire)

    # In a backward that keeps parameters, those of the last group are among the whole ones.
    whole_at_end = (other_elements if frees else groups.total - groups.first + other_elements) * gathered
    end = end_bytes(groups, sizes, tied)
    if not frees:
        end = max(end, groups.first * (gathered + sizes.reduction))
    return TransientBuffers(
        forward=round(whole + result + last_reduced),
        loss=round(whole + last_reduced),
        head=round(whole + last_reduced),
        head_reduction=0 if tied else round(whole - freed_head + groups.head * sizes.reduction),
        layers=tuple(map(in_layer, observed_layers(stage.layers))),
        end=round(whole_at_end + end),
    )


@dataclass(frozen=True)
class ElementBytes:
    """The bytes of one element on its way through fully_shard, in a step whose micro-batches may accumulate.

    A group's whole gradient is copied to a flat buffer to be reduced. The buffer lives until the next group's
    reduction, even in the next micro-batch (_fsdp_state.py, _root_post_backward_final_callback).
    """

    gathered: int
    gradient: int
    wire: int  # of the flat copy
    gloo_copy: int  # of the flat copy, which gloo makes
    shard: float  # of the result of a reduction
    accumulates: bool

    @property
    def reduction(self) -> float:
        """Bytes of a gradient, its flat copy and the result; the gradient is freed before gloo makes its copy."""
        return max(self.gradient, self.gloo_copy) + self.wire + self.shard


def element_bytes(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> ElementBytes:
    """Return the bytes of an element in this layout."""
    wire, shards = config.precision.reduce_bytes, layout.axes_size(layout.sharding_axes)
    accumulates = layout.grad_accumulation_steps(config.train) > 1
    gloo_copy = wire if device == "cpu" and shards > 1 else 0
    return ElementBytes(widths.gathered, config.precision.compute_bytes, wire, gloo_copy, wire / shards, accumulates)


def end_bytes(groups: GroupSizes, sizes: ElementBytes, tied: bool) -> float:
    """Return the bytes of the group that backward ends with: when its gradient is computed, or when it is reduced.

    All gradients' shards are counted elsewhere. The group's own is made by its reduction; where gradients accumulate,
    it is then added to the sum so far. A tied matrix has two gradients, whose sum is made beside them.
    """
    copies = 3 if tied else 1
    computed = groups.first * (copies * sizes.gradient + sizes.gathered) + groups.layer * sizes.wire
    if sizes.accumulates:
        return max(computed, groups.first * sizes.reduction)
    return max(computed - groups.first * sizes.shard, groups.first * (sizes.gradient + sizes.wire))
