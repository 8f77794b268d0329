"""Which of several choices no other beats in both cost and gain."""

from collections.abc import Sequence
from typing import Any

from harness.report import frame
from harness.report.spread import is_unsettled, relative_range, spread
from harness.report.view import View


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of each (cost, gain) whether no other costs no more and gains no less, one of them strictly."""
    least_cost: dict[float, float] = {}  # by gain
    for cost, gain in points:
        least_cost[gain] = min(cost, least_cost.get(gain, cost))
    kept: dict[float, float] = {}
    below = float("inf")  # the least cost of a larger gain
    for gain in sorted(least_cost, reverse=True):
        if least_cost[gain] < below:
            kept[gain] = below = least_cost[gain]
    return [kept.get(gain) == cost for cost, gain in points]


# By column: whether more is better, and whether it is a time or a rate, of which one run's steps tell the spread.
_JUDGED = {
    "tokens_per_second": (True, True),
    "tokens_per_second_per_device": (True, True),
    "mfu": (True, True),
    "step_seconds": (False, True),
    "peak_allocated_bytes": (False, False),
    "state_bytes": (False, False),
    "activation_bytes": (False, False),
    "communication_bytes": (False, False),
}


def best(view: View) -> dict[str, set[int]]:
    """By column the positions of the lines that are best among those of their setting and world size.

    A line alone in its setting is best of nothing, and of two that the spread does not tell apart neither is.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, line in enumerate(view.lines):
        row = line["row"]
        if row["status"] == "ok":
            groups.setdefault((*frame.comparability_key(row), row.get("world_size")), []).append(position)
    found: dict[str, set[int]] = {}
    for name in _JUDGED:
        column = frame.values(view.line_medians, name)
        leaders = [_clear_winner(view, name, column, members) for members in groups.values()]
        known = {leader for leader in leaders if leader is not None}
        if known:
            found[name] = known
    return found


def _clear_winner(view: View, name: str, column: Sequence[Any], members: Sequence[int]) -> int | None:
    """The one line that leads all others by more than its spread and theirs.

    A rate or time of unknown spread leads nothing; figures of memory and bytes without one are taken as they are.
    """
    more, timed = _JUDGED[name]
    known = [position for position in members if column[position] is not None]
    if len(known) < 2:
        return None
    first = (max if more else min)(known, key=lambda position: column[position])
    if any(not _leads(view, name, column, first, other, timed) for other in known if other != first):
        return None
    return first


def _leads(view: View, name: str, column: Sequence[Any], first: int, other: int, timed: bool) -> bool:
    mine, its = column[first], column[other]
    if mine == its:
        return False
    own, theirs = (_spread(view, name, position, timed) for position in (first, other))
    if timed and (own is None or theirs is None):
        return False
    return not is_unsettled(mine / its if its else None, own, theirs)


def _spread(view: View, name: str, position: int, timed: bool) -> float | None:
    line = view.lines[position]
    if timed:
        return spread(line["row"])
    return relative_range([run["row"].get(name) for run in line["runs"] if run["row"]["status"] == "ok"])
