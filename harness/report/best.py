"""The best of several choices: the Pareto front of cost and gain, and the clear winner of each column."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.records.columns import column
from harness.report.comparability import choice_key, group_by
from harness.report.frame import column_values
from harness.report.spread import is_unsettled, relative_range, spread
from harness.report.view import View


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each (cost, gain) whether no other point costs no more and gains no less, one of them strictly."""
    least_cost: dict[float, float] = {}  # by gain
    for cost, gain in points:
        least_cost[gain] = min(cost, least_cost.get(gain, cost))
    front: dict[float, float] = {}  # cost by gain
    lowest = float("inf")  # the least cost of a larger gain
    for gain in sorted(least_cost, reverse=True):
        if least_cost[gain] < lowest:
            front[gain] = lowest = least_cost[gain]
    return [front.get(gain) == cost for cost, gain in points]


class _Ranking(NamedTuple):
    """The rules by which the values of a column are ranked."""

    more_is_better: bool
    is_timed: bool  # a time or a rate, whose spread is known from a single run's steps


_RANKED_COLUMNS = {
    name: _Ranking(more_is_better=column(name).better == "higher", is_timed=column(name).aggregate == "median")
    for name in (
        *("tokens_per_second", "tokens_per_second_per_device", "mfu", "step_seconds"),
        *("peak_allocated_bytes", "activation_bytes", "communication_bytes"),
    )
} | {"state_bytes": _Ranking(more_is_better=False, is_timed=False)}  # a column that only frames have


def best(view: View) -> dict[str, set[int]]:
    """Return by column the positions of the lines that are best among comparable lines of the same world size.

    A line without a comparable one is never marked. If the spread does not separate two lines, neither of them is best.
    """
    ok = [position for position, line in enumerate(view.lines) if line.status == "ok"]
    groups = group_by(ok, lambda position: choice_key(view.lines[position].row))
    winners: dict[str, set[int]] = {}
    for name in _RANKED_COLUMNS:
        values = column_values(view.line_medians, name)
        positions = {_clear_winner(view, name, values, members) for members in groups.values()} - {None}
        if positions:
            winners[name] = {position for position in positions if position is not None}
    return winners


def _clear_winner(view: View, name: str, values: Sequence[Any], members: Sequence[int]) -> int | None:
    """Return the one line that leads all others by more than its spread and theirs.

    A rate or time of unknown spread leads no other. Figures of memory and bytes of unknown spread are taken as exact.
    """
    ranking = _RANKED_COLUMNS[name]
    known = [position for position in members if values[position] is not None]
    if len(known) < 2:
        return None
    first = (max if ranking.more_is_better else min)(known, key=lambda position: values[position])
    others = (position for position in known if position != first)
    return first if all(_leads(view, name, values, first, other) for other in others) else None


def _leads(view: View, name: str, values: Sequence[Any], first: int, other: int) -> bool:
    if values[first] == values[other]:
        return False
    is_timed = _RANKED_COLUMNS[name].is_timed
    own, others = (_spread(view, name, position, is_timed) for position in (first, other))
    if is_timed and (own is None or others is None):
        return False
    return not is_unsettled(values[first] / values[other] if values[other] else None, own, others)


def _spread(view: View, name: str, position: int, is_timed: bool) -> float | None:
    line = view.lines[position]
    if is_timed:
        return spread(line.row)
    return relative_range([run.row.get(name) for run in line.runs if run.status == "ok"])
