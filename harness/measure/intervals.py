"""Unions of time intervals, each an int64 array of shape (n, 2) with start and end in nanoseconds."""

from collections.abc import Iterable

import numpy as np

Intervals = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def merged_intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of (start, end) pairs, in order and without overlaps."""
    ordered = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    if not len(ordered):
        return ordered
    reached = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate(([True], ordered[1:, 0] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((ordered[first, 0], reached[last]), axis=1)


def total_seconds(intervals: Intervals) -> float:
    """Return the total length in seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum()) / 1e9


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Return the times that both cover."""
    pairs = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i, 0], second[j, 0]), min(first[i, 1], second[j, 1])
        if start < end:
            pairs.append((int(start), int(end)))
        if first[i, 1] < second[j, 1]:
            i += 1
        else:
            j += 1
    return merged_intervals(pairs)


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Return the times that `first` covers and `second` does not."""
    if not len(first):
        return first
    start, end = int(first[0, 0]), int(first[-1, 1])
    edges = [
        start,
        *(int(edge) for span in intersection(second, merged_intervals([(start, end)])) for edge in span),
        end,
    ]
    gaps = merged_intervals((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)
    return intersection(first, gaps)
