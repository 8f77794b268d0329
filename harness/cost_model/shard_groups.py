"""The parameters of a rank: how many there are, and which are gathered and reduced together. Imports no torch.

fully_shard pads those of a group to equal shards.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.layout.layout import Layout
from harness.layout.partition import Stage, fsdp_dim, fsdp_rows, parameters_of_stage


def without_data_parallelism(layout: Layout) -> Layout:
    """Return the layout of a single replica's ranks, on which all depends that data parallelism does not divide.

    Layouts that differ in data parallelism alone then share what was computed for one of them.
    """
    return Layout("", "none", 0, 1, 1, layout.tp, False, 1, 1, "1f1b", 1, None, "none", layout.vocabulary_parallel)


@dataclass(frozen=True)
class ShardGroup:
    """The elements of the parameters of a group on one tensor-parallel rank, before data parallelism divides them.

    fully_shard divides every parameter along its first dimension and pads it to equal shards, or along the second one.
    """

    elements: int
    padded: int  # with the padding of every parameter
    at_rest: int  # as many, with the experts of all ranks that share these out, where data parallelism divides them
    uneven: int  # those of parameters that need padding, with it
    last: int  # of the last parameter
    largest: int  # of the largest parameter
    shards: int  # as which data parallelism divides it
    moved: int  # of parameters that are not divided along their first dimension, whose rows are moved in copies
    last_moved: int  # of the last of these
    projections: int = 0  # of a layer's own matrices, with their padding
    trained: int = 0  # of parameters that are not frozen, with their padding


@dataclass(frozen=True)
class ShardGroups:
    """The groups of a stage; one that it does not have has no elements."""

    embedding: ShardGroup
    layer: ShardGroup
    head: ShardGroup
    # The parts of a layer that are groups of their own: its experts, if expert parallelism divides them, and the rest.
    rest: ShardGroup
    experts: ShardGroup
    # Embedding, head or both in the place of the two groups above, where they are tied or not both in the stage. It is
    # whole from the first use to the last one of each pass, and reduced when backward has ended.
    root: ShardGroup
    layers: int
    waiting: int  # the elements of the root's matrix whose gradient waits from the head's backward until the end

    @property
    def parts_of_layer(self) -> list[ShardGroup]:
        """The groups of a layer in the order of forward."""
        return [group for group in (self.rest, self.experts) if group.elements]

    @property
    def padded(self) -> int:
        """The elements of all groups with their padding."""
        return self.embedding.padded + self.head.padded + self.root.padded + self.layers * self.layer.padded

    @property
    def at_rest(self) -> int:
        """The elements that data-parallel shards divide evenly."""
        return self.embedding.at_rest + self.head.at_rest + self.root.at_rest + self.layers * self.layer.at_rest

    @property
    def elements(self) -> int:
        """The elements of all groups."""
        return self.embedding.elements + self.head.elements + self.root.elements + self.layers * self.layer.elements

    @property
    def last_reduced(self) -> ShardGroup:
        """The group whose gradients backward reduces last."""
        return next(group for group in (self.root, self.embedding, self.rest) if group.elements)


def shard_groups(model: ModelConfig, layout: Layout, stage: Stage, trained: bool = False) -> ShardGroups:
    """Return the groups of a stage as this layout divides them; all layers are alike.

    With `trained` they are without frozen parameters, which are gathered and not reduced.
    """
    shards = layout.axes_size(layout.sharding_axes)
    return _shard_groups(model, without_data_parallelism(layout), stage, shards, layout.ep, trained)


@lru_cache(maxsize=2048)
def _shard_groups(model: ModelConfig, layout: Layout, stage: Stage, shards: int, ep: int, trained: bool) -> ShardGroups:
    # Shapes, by how much ep divides them, and whether they are a layer's own matrices and are trained.
    groups = defaultdict[str, list[tuple[tuple[int, ...], int, bool, bool]]](list)
    for parameter in parameters_of_stage(model, stage, trained):
        if parameter.layer in (None, stage.first_layer):
            shape = parameter.local_shape(layout.tp, layout.vocabulary_tp, ep)
            is_projection = parameter.is_layer_matrix and ".lora_" not in parameter.name
            is_trained = model.adapter.trains(parameter.name)
            own = (shape, ep if parameter.is_expert else 1, is_projection, is_trained)
            groups[parameter.group].append(own)
    if not (groups["embedding"] and groups["head"]):
        groups["root"] = groups.pop("embedding", []) + groups.pop("head", [])
    of_layer = groups[str(stage.first_layer)]
    for name, is_divided in (("rest", False), ("experts", True)):
        groups[name] = [each for each in of_layer if (each[1] > 1) == is_divided]
    names = ("embedding", str(stage.first_layer), "head", "rest", "experts", "root")
    embedding, layer, head, rest, experts, root = (_shard_group(groups[name], shards) for name in names)
    waiting = root.largest * stage.holds_head
    return ShardGroups(embedding, layer, head, rest, experts, root, stage.layers, waiting)


def _shard_group(shapes: Sequence[tuple[tuple[int, ...], int, bool, bool]], shards: int) -> ShardGroup:
    sizes, padded, moved, at_rest = [math.prod(shape) for shape, *_ in shapes], list[int](), list[int](), 0
    for shape, ep, *_ in shapes:
        own = max(1, shards // ep)
        rows, row = fsdp_rows(shape, own)
        padded.append(-(-rows // own) * own * row)
        moved += padded[-1:] * fsdp_dim(shape, own)
        at_rest += padded[-1] * (ep if shards > 1 else 1)
    uneven = sum(after for before, after in zip(sizes, padded, strict=True) if after > before)
    own = max(1, shards // max((ep for _, ep, *_ in shapes), default=1))
    # Of a layer's own matrices, and of what is trained.
    projections, trained = (sum(size for size, each in zip(padded, shapes, strict=True) if each[i]) for i in (2, 3))
    return ShardGroup(
        elements=sum(sizes),
        padded=sum(padded),
        at_rest=at_rest,
        uneven=uneven,
        last=sum(sizes[-1:]),
        largest=max(sizes, default=0),
        shards=own,
        moved=sum(moved),
        last_moved=sum(moved[-1:]),
        projections=projections,
        trained=trained,
    )


@lru_cache(maxsize=1024)
def local_parameter_count(
    model: ModelConfig, stage: Stage, tp: int, vocabulary_tp: int, ep: int = 1, trained: bool = False
) -> int:
    """Return the number of a stage's parameters on the tensor-parallel rank that has most of them.

    Matrices are cut as the plan says, and the norms are not. `vocabulary_tp` is the number of parts of embedding and
    head, and `ep` that of the experts.
    """
    return sum(
        math.prod(each.local_shape(tp, vocabulary_tp, ep)) for each in parameters_of_stage(model, stage, trained)
    )
