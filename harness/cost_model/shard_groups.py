"""The parameters of a rank: how many there are, and which are gathered and reduced together. Imports no torch.

fully_shard pads those of a group to equal shards.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_sizes, parameters_of_stage


def without_data_parallelism(layout: Layout) -> Layout:
    """Return the layout of a single replica's ranks, on which all depends that data parallelism does not divide.

    Layouts that differ in data parallelism alone then share what was computed for one of them.
    """
    return Layout("", "none", 0, 1, 1, layout.tp, False, 1, 1, "1f1b", 1, None, "none", layout.vocabulary_parallel)


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
            groups[parameter.group].append(parameter.local_shape(layout.tp, layout.vocabulary_tp))
    ends, layer = [groups["embedding"], groups["head"]], _shard_group(groups[str(stage.first_layer)], shards)
    if all(ends):
        embedding, head = (_shard_group(shapes, shards) for shapes in ends)
        return ShardGroups(embedding, layer, head, NO_GROUP, stage.layers, waiting=0)
    root = _shard_group(ends[0] or ends[1], shards)
    waiting = root.largest if stage.holds_head else 0
    return ShardGroups(NO_GROUP, layer, NO_GROUP, root, stage.layers, waiting)


def _shard_group(shapes: Sequence[tuple[int, ...]], shards: int) -> ShardGroup:
    sizes = [math.prod(shape) for shape in shapes]
    padded = [-(-rows // shards) * shards * math.prod(rest) for rows, *rest in shapes]
    uneven = sum(after for before, after in zip(sizes, padded, strict=True) if after > before)
    return ShardGroup(sum(sizes), sum(padded), uneven, sum(sizes[-1:]), max(sizes, default=0))


@lru_cache(maxsize=1024)
def local_parameter_count(model: ModelConfig, stage: Stage, tp: int, vocabulary_tp: int | None = None) -> int:
    """Return the number of a stage's parameters on the tensor-parallel rank that has most of them.

    Matrices are cut as the plan says, and the norms are not. `vocabulary_tp` is the number of parts of embedding and
    head, by default as many as of the other matrices.
    """
    vocabulary_parts = tp if vocabulary_tp is None else vocabulary_tp
    parameters = parameters_of_stage(model, stage)
    return sum(math.prod(parameter.local_shape(tp, vocabulary_parts)) for parameter in parameters)


def optimizer_parameter_count(model: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> int:
    """Return the number of parameters whose optimizer state is on the rank that has most of them."""
    shards, by_parameter = layout.shard_count("optimizer"), layout.partitions_by_parameter
    return _largest_partition(model, without_data_parallelism(layout), tuple(stages), shards, by_parameter)


@lru_cache(maxsize=1024)
def _largest_partition(
    model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int, by_parameter: bool
) -> int:
    """Return the parameters of the fullest rank, as ZeroRedundancyOptimizer assigns them: the largest one first.

    Each goes to the rank that has fewest, and to the first of several such ranks; others divide all parameters evenly.
    """
    sizes = local_sizes(model, layout, stages)
    if not by_parameter:
        return math.ceil(sum(sizes) / shards)
    ranks = [(0.0, rank) for rank in range(shards)]
    for size in sorted(sizes, reverse=True):
        total, rank = ranks[0]
        heapq.heapreplace(ranks, (total + size, rank))
    return math.ceil(max(ranks)[0])
