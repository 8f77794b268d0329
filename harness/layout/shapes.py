"""The shapes of parameters by name, and the number of their elements."""

import math
from collections.abc import Mapping

Shapes = dict[str, tuple[int, ...]]


def numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of elements of all these parameters together."""
    return sum(map(math.prod, shapes.values()))
