"""Unions of spans of time, each an array of shape (n, 2): begin and end in nanoseconds."""

from collections.abc import Iterable

import numpy as np

Intervals = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def merged_intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """What they cover, in order and without overlaps."""
    ordered = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    if not len(ordered):
        return ordered
    reached = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate(([True], ordered[1:, 0] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((ordered[first, 0], reached[last]), axis=1)


def total_seconds(of: Intervals) -> float:
    return float((of[:, 1] - of[:, 0]).sum()) / 1e9


def intersection(some: Intervals, others: Intervals) -> Intervals:
    """What both cover."""
    found = []
    i = j = 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i, 0], others[j, 0]), min(some[i, 1], others[j, 1])
        if begin < end:
            found.append((int(begin), int(end)))
        if some[i, 1] < others[j, 1]:
            i += 1
        else:
            j += 1
    return merged_intervals(found)


def difference(some: Intervals, others: Intervals) -> Intervals:
    """What the first cover and the second do not."""
    if not len(some):
        return some
    begin, end = int(some[0, 0]), int(some[-1, 1])
    edges = [
        begin,
        *(int(edge) for span in intersection(others, merged_intervals([(begin, end)])) for edge in span),
        end,
    ]
    gaps = merged_intervals((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)
    return intersection(some, gaps)
