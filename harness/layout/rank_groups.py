"""The mesh axes of a group of ranks, by which what it sends is counted."""

from collections.abc import Sequence

from harness.config.strategy import AXES, DATA_AXES
from harness.layout.layout import Layout


def is_data_parallel_axis(axis: str) -> bool:
    """Return whether a group's ranks have different tokens, so that what c10d gathers among them is parameters.

    `axis` is the name of one mesh axis, or of several joined by '+'.
    """
    return set(axis.split("+")) <= set(DATA_AXES)


def group_axes(group_ranks: Sequence[int], layout: Layout) -> str:
    """Return the mesh axes along which a group lies, outermost first and joined by '+'.

    'world' is a group of every rank that lies along more than the data axes, 'self' one of a single rank.
    """
    members = [layout.coordinates(rank) for rank in group_ranks]
    axes = "+".join(axis for axis in AXES if len({coordinates[axis] for coordinates in members}) > 1)
    if "+" in axes and len(group_ranks) == layout.world_size and not is_data_parallel_axis(axes):
        return "world"
    return axes or "self"
