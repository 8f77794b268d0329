"""The memory of parameters that are whole for a while and of gradients on their way to shards. Imports no torch."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.cost_model.stage_activations import observed_layers
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, local_numel
from harness.layout.state_widths import StateWidths


@dataclass(frozen=True)
class TransientBuffers:
    """The bytes at the moments of a micro-batch's pass through a stage, beside state, activations and temporaries."""

    forward: int = 0  # at the end of forward
    loss: int = 0
    head: int = 0  # in the head's backward, without the head's gradient
    head_reduction: int = 0  # when that gradient is reduced
    layers: tuple[int, ...] = ()  # in the backward of the layers that observed_layers names, without their gradients
    end: int = 0  # when the embedding's gradient, which is included, is reduced

    @property
    def largest(self) -> int:
        """The most bytes at any of these moments."""
        return max(self.forward, self.loss, self.head, self.head_reduction, *self.layers, self.end)

    def in_layer(self, index: int) -> int:
        """Return the bytes in the backward of the layer with this index among those observed."""
        return self.layers[index] if self.layers else 0


@dataclass(frozen=True)
class GroupSizes:
    """The elements of the parameters of a stage that are gathered and reduced together; 0 where there are none."""

    embedding: float
    layer: float  # the largest
    head: float  # with the embedding, where they are tied
    total: float

    @property
    def first(self) -> float:
        """The elements of the group whose gradient is reduced last."""
        return self.embedding or self.head or self.layer


def parameter_groups(model: ModelConfig, layout: Layout, stage: Stage) -> dict[str, float]:
    """Return the elements of each group of parameters that fully_shard gathers together, by the group's name.

    Tensor parallelism has divided them already. Every layer is a group, and so are the embedding and the head, which
    are one group where they are tied.
    """
    groups: dict[str, float] = defaultdict(float)
    for name, elements in local_numel(model, layout, stage).items():
        groups[group_name(name, model)] += elements
    return groups


def group_name(parameter: str, model: ModelConfig) -> str:
    """Return the name of a parameter's group: `layers.` and the index of its layer, `embedding` or `head`."""
    profile = model_profile(model)
    layer = profile.layer_index(parameter)
    if layer is not None:
        return f"layers.{layer}"
    return "embedding" if parameter in profile.embedding_shapes and not model.tie_word_embeddings else "head"


@lru_cache(maxsize=1024)
def group_sizes(model: ModelConfig, layout: Layout, stage: Stage, by_parameter: bool) -> GroupSizes:
    """Return the sizes of a stage's groups, or of the largest parameter of each group."""
    sizes = parameter_groups(model, layout, stage)
    total = sum(sizes.values())
    if by_parameter:
        sizes = defaultdict(float)
        for name, elements in local_numel(model, layout, stage).items():
            group = group_name(name, model)
            sizes[group] = max(sizes[group], elements)
    return GroupSizes(sizes.get("embedding", 0), _largest_layer(sizes), sizes.get("head", 0), total)


def transient_buffers(
    config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage], stage: Stage
) -> TransientBuffers:
    """Return the buffers of one of a rank's stages; none where nothing is sharded but optimizer state."""
    if layout.uses_deepspeed_zero:
        return deepspeed_buffers(config, layout, widths, stage) if layout.zero_stage > 1 else TransientBuffers()
    if layout.data_parallel != "fsdp":
        return TransientBuffers()
    if layout.zero_stage == 3:
        return resharded_buffers(config, layout, widths, stage)
    others = [group_sizes(config.model, layout, other, by_parameter=False).total for other in stages if other != stage]
    return whole_buffers(config, layout, widths, stage, sum(others))


def resharded_buffers(config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage) -> TransientBuffers:
    """Return the buffers of fully_shard that gathers a group for forward and again for backward.

    Beside the group in use there is the flat result of a gather: in forward that of the same group, in backward that of
    the next one, which is prefetched. The group of tied weights is the root's, whole from its first to its last use.
    """
    groups, sizes = group_sizes(config.model, layout, stage, by_parameter=False), element_bytes(config, layout, widths)
    tied, gathered = config.model.tie_word_embeddings, sizes.gathered
    root = groups.head * (gathered + sizes.gradient) if tied else 0  # the head's gradient waits for the embedding's
    last_reduced = groups.first * sizes.wire * sizes.accumulates

    def in_layer(following: int) -> int:
        prefetched = groups.layer if following < stage.layers - 1 else groups.embedding
        reduced = groups.layer if following else groups.head * (not tied)
        return round(root + (groups.layer + prefetched) * gathered + reduced * sizes.wire)

    return TransientBuffers(
        forward=round(2 * max(groups.head, groups.layer) * gathered + last_reduced),
        loss=round(last_reduced),
        head=round((groups.head + groups.layer) * gathered + last_reduced),
        head_reduction=0 if tied else round(groups.layer * gathered + groups.head * sizes.reduction),
        layers=tuple(map(in_layer, observed_layers(stage.layers))),
        end=round(end_bytes(groups, sizes, tied)),
    )


def whole_buffers(
    config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage, other_elements: float
) -> TransientBuffers:
    """Return the buffers of fully_shard that keeps parameters whole from the first forward to the last backward.

    `other_elements` is the number of whole elements in the rank's other stages. The last backward frees each group as
    it goes; where it is the only one of a step, there is none that keeps them.
    """
    groups, sizes = group_sizes(config.model, layout, stage, by_parameter=False), element_bytes(config, layout, widths)
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
    shard: float  # of the result of a reduction
    accumulates: bool

    @property
    def reduction(self) -> float:
        """Bytes of a gradient, its copy and the result."""
        return self.gradient + self.wire + self.shard


def element_bytes(config: RunConfig, layout: Layout, widths: StateWidths) -> ElementBytes:
    """Return the bytes of an element in this layout."""
    wire, shards = config.precision.reduce_bytes, layout.axes_size(layout.sharding_axes)
    accumulates = layout.grad_accumulation_steps(config.train) > 1
    return ElementBytes(widths.gathered, config.precision.compute_bytes, wire, wire / shards, accumulates)


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


def deepspeed_buffers(config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage) -> TransientBuffers:
    """Return the buffers of DeepSpeed's stages 2 and 3, which gather and reduce parameter by parameter.

    A gradient that is no larger than a bucket is copied into it and freed. A larger one is reduced by itself, in mixed
    precision from an fp32 copy: of all of it in stage 3, in stage 2 of the part of one rank after the other.
    """
    sizes = group_sizes(config.model, layout, stage, by_parameter=True)
    whole = widths.gathered if layout.zero_stage == 3 else 0
    gradient, wire = config.precision.compute_bytes, config.precision.reduce_bytes
    share = 1 if layout.zero_stage == 3 else 1 / layout.dp_shard

    def reduction(elements: float) -> float:
        is_copied = config.precision.is_mixed and elements > widths.reduce_bucket_elements
        return elements * (gradient + wire * share * is_copied)

    in_layer = round(sizes.layer * whole + reduction(sizes.layer) - sizes.layer * gradient)
    return TransientBuffers(
        forward=round(max(sizes.head, sizes.layer) * whole),
        head=round(sizes.head * whole),
        head_reduction=round(reduction(sizes.head)),
        layers=(in_layer,) * len(observed_layers(stage.layers)),
        end=round(sizes.first * whole + reduction(sizes.first)),
    )


def _largest_layer(sizes: Mapping[str, float]) -> float:
    return max((size for name, size in sizes.items() if name.startswith("layers.")), default=0)
