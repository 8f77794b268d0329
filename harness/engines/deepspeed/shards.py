"""The correspondence between the parameters of this rank's model and slices of the plain model's parameters."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ParamSlice(NamedTuple):
    """The slice of a plain model's parameter that this rank holds: the whole one without tensor parallelism.

    `box` holds (start, stop) along each dimension of the plain parameter.
    """

    name: str
    shape: tuple[int, ...]  # the shape of the plain model's parameter
    box: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "ParamSlice":
        """Return the slice that covers a whole parameter."""
        return cls(name, tuple(shape), tuple((0, size) for size in shape))

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, int, tuple[int, ...], tuple[tuple[int, int], ...]]]:
        """Yield [start, stop) of the flattened slice as boxes of the plain parameter.

        Each is (start, stop, shape, box): where it starts and stops in the flattened slice, and its shape and box as in
        harness.tensors.shard.Shard. A slice of whole rows gives one interval of the flattened parameter; a slice of
        columns gives up to three boxes: the end of a row, whole rows, the beginning of a row.
        """
        numel, width = math.prod(self.shape), math.prod(self.shape[1:])
        (row, _), *columns = self.box
        if all(edges == (0, size) for edges, size in zip(columns, self.shape[1:], strict=True)):
            yield start, stop, (numel,), ((row * width + start, row * width + stop),)
            return
        ((left, right),) = columns
        size = right - left
        while start < stop:
            first, offset = divmod(start, size)
            rows = max(1, (stop - start) // size) if offset == 0 else 1
            end = min(stop, (first + rows) * size)
            across = (left + offset, left + offset + end - start) if rows == 1 else (left, right)
            yield start, end, self.shape, ((row + first, row + first + rows), across)
            start = end


ParamSlices = dict[int, ParamSlice]  # the key is the id() of a parameter of this rank's model
