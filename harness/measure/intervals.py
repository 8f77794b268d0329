"""Unions of time intervals, each an int64 array of shape (n, 2) with start and end in nanoseconds."""

from collections.abc import Callable, Iterable

import numpy as np

Intervals = np.ndarray[tuple[int, int], np.dtype[np.int64]]

_Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


def merged_intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of (start, end) pairs, in order and without overlaps."""
    ordered = np.array(list(pairs), np.int64).reshape(-1, 2)
    if not len(ordered):
        return ordered
    ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate(([True], ordered[1:, 0] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((ordered[first, 0], reached[last]), axis=1)


def total_seconds(intervals: Intervals) -> float:
    """Return the total length in seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum()) / 1e9


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Return the times that both cover."""
    return _where(first, second, lambda in_first, in_second: in_first & in_second)


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Return the times that `first` covers and `second` does not."""
    return _where(first, second, lambda in_first, in_second: in_first & ~in_second)


def _where(first: Intervals, second: Intervals, is_wanted: Callable[[_Flags, _Flags], _Flags]) -> Intervals:
    """Return the times between neighboring edges of two unions that are wanted, by which of the two cover them."""
    edges = np.concatenate((first.ravel(), second.ravel()))
    order = np.argsort(edges, kind="stable")
    of_first = np.concatenate((np.tile([1, -1], len(first)), np.zeros(second.size, np.int64)))
    of_second = np.concatenate((np.zeros(first.size, np.int64), np.tile([1, -1], len(second))))
    in_first, in_second = (np.cumsum(changes[order])[:-1] > 0 for changes in (of_first, of_second))
    starts, ends = edges[order][:-1], edges[order][1:]
    wanted = is_wanted(in_first, in_second) & (starts < ends)
    starts, ends = starts[wanted], ends[wanted]
    if not len(starts):
        return np.zeros((0, 2), np.int64)
    is_new = starts[1:] > ends[:-1]
    return np.stack((starts[np.concatenate(([True], is_new))], ends[np.concatenate((is_new, [True]))]), axis=1)
