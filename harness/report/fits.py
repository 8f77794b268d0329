"""What fits in a device's memory, and the fastest of that."""

from collections.abc import Sequence

from harness.report.answers import MOST_RIVALS, Answer, fastest_text
from harness.report.document import Table
from harness.report.reported import Reported, ReportedGroup, names
from harness.report.speeds import leads, remedy
from harness.report.text import byte_unit, bytes_text, pluralize, rounded_up

_MOST_ROWS = 12  # of the table of what fits

_CAPTION = "Each row is certainly faster than those above it, and memory is rounded up"


def fitting(group: ReportedGroup, fits_in: int, chosen: ReportedGroup | None) -> Answer:
    """Return what fits in a device's memory, and which of that is the fastest.

    Args:
        group: All configurations.
        fits_in: The memory in bytes.
        chosen: The group of those that fit, None if none does.
    """
    limit = bytes_text(fits_in)
    lead = f"Fits in {limit}{f' {group.title}' if group.title else ''}"
    peaks = [member.peak for member in group.members if member.peak is not None]
    if chosen is None:
        return lead, f"Nothing measured here: the least is {bytes_text(min(peaks))}." if peaks else "Not known."
    count = f"{len(chosen.members)} of {pluralize(len(group.members), 'configuration')}"
    if chosen.fastest:
        winner = chosen.fastest[0]
        return lead, f"{count}, of which {winner.label} is the fastest: {winner.rate_text} in {winner.peak_text}."
    if len(chosen.ranked) > 1:
        return lead, f"{count}. {fastest_text(chosen)}"
    if len(chosen.members) == 1:
        (only,) = chosen.members
        return lead, f"{count}: {only.label} in {only.peak_text}."
    ranking = f"Their speeds are not ranked; {remedy([member.record for member in chosen.unranked])} would rank them."
    return lead, f"{count}: {names(chosen.members)}. {ranking}"


def fits_table(groups: Sequence[ReportedGroup]) -> Table | None:
    """Return the fastest configuration for each amount of memory per rank; None where no speeds are ranked."""
    entries = [
        (group, line) for group in groups if len(group.front) > 1 or len(group.ranked) > 1 for line in group.front
    ]
    if not entries:
        return None
    caption = _CAPTION
    if len(entries) > _MOST_ROWS:
        caption = f"{_MOST_ROWS} of {len(entries)} steps. {caption}"
        step = (len(entries) - 1) / (_MOST_ROWS - 1)
        entries = [entries[round(row * step)] for row in range(_MOST_ROWS)]
    unit = byte_unit([line.peak for _, line in entries])
    columns = {
        "configurations": [group.title for group, _ in entries] if len({id(group) for group, _ in entries}) > 1 else [],
        "memory per rank": [f"from {rounded_up(line.peak or 0, unit)} {unit.name}" for _, line in entries],
        "fastest that fits": [line.label for _, line in entries],
        "may be as fast or faster": [_may_be_as_fast(line, group) for group, line in entries],
        "tokens/s": [f"{line.speed.median:,.0f} [{line.speed.low:,.0f}–{line.speed.high:,.0f}]" for _, line in entries],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    strategies = [str(line.row.get("strategy") or "") for _, line in entries]
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, len(columns) - 1, caption, strategies)


def _may_be_as_fast(line: Reported, group: ReportedGroup) -> str:
    """Return what fits before the next on the front does and is not certainly slower, with the memory that it needs.

    Such a configuration is not certainly slower, or not ranked.
    """
    peak = line.peak or 0
    following = min((size for other in group.front if (size := other.peak or 0) > peak), default=None)
    fitting = [other for other in group.members if other.peak and (following is None or other.peak < following)]
    others = sorted((other for other in fitting if other is not line), key=lambda other: (other.peak or 0) > peak)
    rivals = [_rival(other, peak) for other in others if other.speed.is_ranked and not leads(line.speed, [other.speed])]
    rivals += [
        _rival(other, peak) for other in others if other.speed.has_too_few_runs and other.speed.high >= line.speed.low
    ]
    more = [f"{len(rivals) - MOST_RIVALS} more"] if len(rivals) > MOST_RIVALS else []
    return ", ".join([*rivals[:MOST_RIVALS], *more])


def _rival(line: Reported, fits_in: int) -> str:
    """Return a label with the number of runs where they are too few, and the peak where it does not fit."""
    few = "" if line.speed.is_ranked else f" (n = {line.speed.runs})"
    if (line.peak or 0) <= fits_in:
        return f"{line.label}{few}"
    unit = byte_unit([line.peak])
    return f"{line.label}{few} from {rounded_up(line.peak or 0, unit)} {unit.name}"
