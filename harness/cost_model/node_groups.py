"""Groups of ranks on the nodes of a cluster, and the share of what a rank sends that leaves its node. No torch."""

from dataclasses import dataclass
from functools import lru_cache

from harness.config.strategy import AXES
from harness.layout.layout import Layout


@dataclass(frozen=True)
class RankGroup:
    """The devices that one collective connects: their number, and over how many nodes they are spread."""

    ranks: int
    nodes: int


@lru_cache(maxsize=4096)
def group_of(layout: Layout, axes: tuple[str, ...], gpus_per_node: int) -> RankGroup:
    """Return the group of a rank along axes of a layout, whose ranks fill one node after another, innermost first.

    Axes that are not neighbors in the mesh are taken as if only axes of a single rank lay between them.
    """
    wide = [AXES.index(axis) for axis in axes if layout.axis_sizes[axis] > 1]
    ranks, stride = layout.axes_size(axes), layout.axes_size(AXES[max(wide, default=0) + 1 :])
    in_node = max(1, min(ranks, gpus_per_node // stride))
    return RankGroup(ranks, -(-ranks // in_node))


def secondary_group(layout: Layout, gpus_per_node: int) -> RankGroup:
    """Return the neighboring ranks that share out the parameters which backward gathers."""
    parts = layout.secondary_shards
    return RankGroup(parts, -(-parts // gpus_per_node))


def leaving_share(operation: str, group: RankGroup) -> float:
    """Return the share of what a rank sends in a group that leaves its node, as the mean of the node's devices.

    A ring leaves a node once for all of its ranks there, as a pipeline does to either side. In an all-to-all each rank
    sends as much to every other rank.
    """
    if group.nodes == 1:
        return 0.0
    in_node = group.ranks / group.nodes
    return (group.ranks - in_node) / (group.ranks - 1) if operation == "all_to_all" else 1 / in_node
