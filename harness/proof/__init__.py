"""A run proves itself, from what its ranks wrote down: the layout it ran, the work it did, what it trained."""

from typing import Any

Rank = dict[str, Any]  # a rank file
Box = tuple[tuple[int, int], ...]
