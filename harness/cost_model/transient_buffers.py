"""The memory of parameters that are whole for a while and of gradients on their way to shards. Imports no torch.

Parameters are gathered and reduced in groups, which fully_shard divides among shards with padding.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from harness.config.model import ModelConfig
from harness.cost_model.layer_backward import Moment
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_numel, parameters_of_stage


class LayerBuffers(Protocol):
    """A layer whose buffers change within its backward."""

    def __hash__(self) -> int:
        """Return a hash of all that decides them."""

    def buffer_bytes(self, moments: Sequence[Moment], new_gradients: int) -> list[tuple[int, int]]:
        """Return the bytes of gradients and of buffers at each of the moments of its backward.

        `new_gradients` is the bytes of the rank's own gradients that the pass allocates.
        """


class Pass(NamedTuple):
    """The place of a micro-batch's pass through a stage among those of its step."""

    is_first: bool = True  # whether no earlier micro-batch has left gradients in the stage
    gathers: bool = True  # whether its forward is the only one of the stage so far
    is_last: bool = True  # whether its backward is the stage's last one of the step


ONLY_PASS = Pass()


@dataclass(frozen=True)
class TransientBuffers:
    """The bytes at the moments of a micro-batch's pass through a stage, beside state, activations and temporaries."""

    forward: int = 0  # at the end of forward
    forward_layers: tuple[int, ...] = ()  # the most in each layer's forward, where layers differ in it
    last_layer: int = 0  # when forward enters the last layer and gathers its parameters
    loss: int = 0
    entering: int = 0  # when backward begins and gathers parameters
    head: int = 0  # in the head's backward, without the head's gradient
    head_reduction: int = 0  # when that gradient is reduced
    reduces_head: bool = False  # whether DeepSpeed's stage 2 reduces it before the layers' and allocates its partition
    later: int = 0  # of the rank's gradients, those that come later and stay until the end of backward
    entered: tuple[int, ...] = ()  # when backward enters the layers that observed_layers names
    layers: tuple[int, ...] = ()  # in the backward of these layers, without their gradients
    reductions: tuple[int, ...] = ()  # at the end of these backwards, while gradients are reduced
    observed: "tuple[LayerBuffers, ...]" = ()  # these layers, where buffers change from moment to moment
    middle: "tuple[tuple[int, LayerBuffers], ...]" = ()  # other layers that so many follow and that have more buffers
    last_gradient: int = 0  # when the embedding's gradient, which is included, is computed
    reduces_before_end: bool = True  # whether DeepSpeed's stage 2 has allocated its partition of gradients before that
    first_reduction: int = 0  # in the reduction behind which it allocates the partition
    end: int = 0  # when the last gradient, which is included, is reduced

    @property
    def largest(self) -> int:
        """The most bytes at any of these moments."""
        in_forward = (self.forward, *self.forward_layers, self.last_layer)
        around_head = (self.loss, self.entering, self.head, self.head_reduction)
        around_layers = (*self.entered, *self.layers, *self.reductions)
        at_end = (self.last_gradient, self.first_reduction, self.end)
        return max(*in_forward, *around_head, *around_layers, *at_end)

    def in_layer(self, index: int) -> int:
        """Return the bytes in the backward of the layer with this index among those observed."""
        return self.layers[index] if self.layers else 0


class GroupSizes(NamedTuple):
    """The elements of the parameters of a stage that are gathered and reduced together; 0 where there are none."""

    layer: float  # the largest
    head: float  # with the embedding, where they are tied
    total: float


def without_data_parallelism(layout: Layout) -> Layout:
    """Return the layout of a single replica's ranks, on which all depends that data parallelism does not divide.

    Layouts that differ in data parallelism alone then share what was computed for one of them.
    """
    return Layout("", "none", 0, 1, 1, layout.tp, False, 1, 1, "1f1b", 1, None, "none", layout.vocabulary_parallel)


def group_sizes(model: ModelConfig, layout: Layout, stage: Stage) -> GroupSizes:
    """Return the sizes of a stage's groups: every layer is one, and so are embedding and head unless they are tied."""
    return _group_sizes(model, without_data_parallelism(layout), stage)


@lru_cache(maxsize=1024)
def _group_sizes(model: ModelConfig, layout: Layout, stage: Stage) -> GroupSizes:
    elements, sizes = local_numel(model, layout, stage), defaultdict[str, float](float)
    for parameter in parameters_of_stage(model, stage):
        sizes[parameter.group] += elements[parameter.name]
    total = sum(sizes.values())
    layers = (size for name, size in sizes.items() if name not in ("embedding", "head"))
    return GroupSizes(max(layers, default=0), sizes.get("head", 0), total)


@dataclass(frozen=True)
class ShardGroup:
    """The elements of the parameters of a group on one tensor-parallel rank, before data parallelism divides them.

    fully_shard divides every parameter along its first dimension and pads it to equal shards.
    """

    elements: int = 0
    padded: int = 0  # with the padding of every parameter
    uneven: int = 0  # those of parameters that need padding, with it
    last: int = 0  # of the last parameter
    largest: int = 0  # of the largest parameter


NO_GROUP = ShardGroup()


@dataclass(frozen=True)
class ShardGroups:
    """The groups of a stage; one that it does not have has no elements."""

    embedding: ShardGroup
    layer: ShardGroup
    head: ShardGroup
    # Embedding, head or both in the place of the two groups above, where they are tied or not both in the stage. It is
    # whole from the first use to the last one of each pass, and reduced when backward has ended.
    root: ShardGroup
    layers: int
    waiting: int  # the elements of the root's matrix whose gradient waits from the head's backward until the end

    @property
    def padded(self) -> int:
        """The elements of all groups with their padding."""
        ends = self.embedding.padded + self.head.padded + self.root.padded
        return ends + self.layers * self.layer.padded

    @property
    def elements(self) -> int:
        """The elements of all groups."""
        ends = self.embedding.elements + self.head.elements + self.root.elements
        return ends + self.layers * self.layer.elements

    @property
    def last_reduced(self) -> ShardGroup:
        """The group whose gradients backward reduces last."""
        return next(group for group in (self.root, self.embedding, self.layer) if group.elements)


def shard_groups(model: ModelConfig, layout: Layout, stage: Stage) -> ShardGroups:
    """Return the groups of a stage as this layout divides them; all layers are alike."""
    return _shard_groups(model, without_data_parallelism(layout), stage, layout.axes_size(layout.sharding_axes))


@lru_cache(maxsize=2048)
def _shard_groups(model: ModelConfig, layout: Layout, stage: Stage, shards: int) -> ShardGroups:
    groups = defaultdict[str, list[tuple[int, ...]]](list)
    for parameter in parameters_of_stage(model, stage):
        if parameter.layer in (None, stage.first_layer):
            groups[parameter.group].append(parameter.largest_part(layout.tp, layout.vocabulary_tp))
    ends, layer = [groups["embedding"], groups["head"]], _shard_group(groups[str(stage.first_layer)], shards)
    if all(ends):
        embedding, head = (_shard_group(shapes, shards) for shapes in ends)
        return ShardGroups(embedding, layer, head, NO_GROUP, stage.layers, waiting=0)
    root = _shard_group(ends[0] or ends[1], shards)
    waiting = root.largest if stage.holds_head else 0
    return ShardGroups(NO_GROUP, layer, NO_GROUP, root, stage.layers, waiting)


def _shard_group(shapes: Sequence[tuple[int, ...]], shards: int) -> ShardGroup:
    if not shapes:
        return NO_GROUP
    sizes = [math.prod(shape) for shape in shapes]
    padded = [-(-rows // shards) * shards * math.prod(rest) for rows, *rest in shapes]
    uneven = sum(after for before, after in zip(sizes, padded, strict=True) if after > before)
    return ShardGroup(sum(sizes), sum(padded), uneven, sizes[-1], max(sizes))
