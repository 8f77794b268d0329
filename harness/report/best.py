"""The best value of each column among comparable configurations."""

from collections.abc import Sequence
from typing import Any

from harness.report.comparability import EQUAL_BYTES
from harness.report.frame import column_values
from harness.report.view import View

# The columns whose best value is marked: those of speed, which the ranking decides, and those that are counted exactly.
_TIMED = ("tokens_per_second", "tokens_per_second_per_device", "mfu", "step_seconds")

_COUNTED = ("peak_allocated_bytes", "activation_bytes", "communication_bytes", "state_bytes")


def best(view: View) -> dict[str, set[int]]:
    """Return by column the positions of the lines that are best among comparable lines on as many ranks.

    Of speed and time it is the line that is certainly the fastest. Bytes are exact; a value that lines of different
    programs share is not marked.
    """
    winners: dict[str, set[int]] = {name: set() for name in (*_TIMED, *_COUNTED)}
    columns = {name: column_values(view.line_medians, name) for name in winners}
    for group in view.ranking.groups:
        for name in _TIMED:
            winners[name] |= {position for position in group.fastest if columns[name][position] is not None}
        for name in _COUNTED:
            winners[name] |= _least(columns[name], group.members, view)
    return {name: positions for name, positions in winners.items() if positions}


def _least(values: Sequence[Any], members: Sequence[int], view: View) -> set[int]:
    """Return the members with the smallest value, if they run one program and others do not."""
    known = [position for position in members if values[position] is not None]
    programs = [view.ranking.standings[position].program for position in known]
    least = min((values[position] for position in known), default=0)
    smallest = {position for position in known if values[position] <= (1 + EQUAL_BYTES) * least}
    names = {view.ranking.standings[position].program for position in smallest}
    return smallest if len(names) == 1 and len(set(programs)) > 1 else set()
