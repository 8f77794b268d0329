"""What a parameter of this rank's model is of the plain model, and where a part of it lies there."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ParamSlice(NamedTuple):
    """Of a parameter of the plain model the box that tensor parallelism leaves this rank; without it the whole."""

    name: str
    shape: tuple[int, ...]  # of the whole
    box: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "ParamSlice":
        return cls(name, tuple(shape), tuple((0, size) for size in shape))

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, int, tuple[int, ...], tuple[tuple[int, int], ...]]]:
        """[start, stop) of the flattened shard as boxes of the whole: each with where it begins and ends in the shard.

        Where the shard is whole rows it is an interval of the flattened whole. Of a shard of columns it is up to three
        boxes: the end of a row, whole rows, the beginning of a row.
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


ParamSlices = dict[int, ParamSlice]  # by id of the parameter
