"""The shards of tensors that a rank has, as it reports them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension of a whole tensor


class TensorFingerprint(NamedTuple):
    """A rank's shard of a tensor, reduced to two numbers. NaN is None after it was written to a file."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    square: float | None  # sum of squares
    projection: float | None  # inner product with the parameter's random vector of unit variance


class StateShard(NamedTuple):
    """A rank's shard of a parameter, gradient or optimizer state, without its values."""

    name: str
    state_name: str  # which optimizer state it is; empty for the values themselves
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    dtype: str


def read_fingerprints(entries: Sequence[Sequence[Any]]) -> list[TensorFingerprint]:
    """Return the fingerprints in a rank's file, which are arrays there."""
    return [
        TensorFingerprint(name, tuple(shape), tuple((start, stop) for start, stop in box), square, projection)
        for name, shape, box, square, projection in entries
    ]


def read_shards(entries: Sequence[Sequence[Any]]) -> list[StateShard]:
    """Return the shards in a rank's file, which are arrays there."""
    return [
        StateShard(name, state_name, tuple(shape), tuple((start, stop) for start, stop in box), dtype)
        for name, state_name, shape, box, dtype in entries
    ]
