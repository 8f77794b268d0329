"""The reasons of what is fastest and smallest: the parts of a step that are longer, and of a peak that are larger."""

from harness.report.labels import PEAK_TITLES, STEP_TITLES
from harness.report.lines import Line
from harness.report.sentences import sentence
from harness.report.text import byte_unit, format_numbers

# A part is named if it is at least this share of the difference; the named ones are at least EXPLAINED of it.
_LEAST_SHARE, _EXPLAINED = 0.2, 0.5

_MOST_PARTS = 2


def step_reason(fast: Line, slow: Line) -> str:
    """Return the sentence on why a step of `slow` is longer; empty where no part of the step explains it.

    A part explains it if it is longer in the median runs, and in every run of `slow` longer than in any run of `fast`.
    """
    fast_row, slow_row = fast.median_run.row, slow.median_run.row  # parts add up within one run only
    names = {"whole": "step_seconds"} | {
        title: name for name, title in STEP_TITLES.items() if min(_seconds(slow, name)) > max(_seconds(fast, name))
    }
    longer = {title: (slow_row.get(name) or 0.0) - (fast_row.get(name) or 0.0) for title, name in names.items()}
    difference = longer.pop("whole")
    parts = _largest(longer, difference)
    if not parts:
        return ""
    before, after = fast.row.get("executed_flops"), slow.row.get("executed_flops")
    recomputed = after / before if before and after and after > 1.02 * before else None
    return sentence("step_reason", fast=fast, slow=slow, difference=difference, parts=parts, recomputed=recomputed)


def _seconds(line: Line, name: str) -> list[float]:
    return [run.row.get(name) or 0.0 for run in line.timed]


def _largest(differences: dict[str, float], whole: float) -> dict[str, float]:
    """Return the largest parts of a difference, if together they explain it; none if there is no difference."""
    ordered = sorted(differences.items(), key=lambda item: -item[1])[:_MOST_PARTS]
    named = {title: part for title, part in ordered if part >= _LEAST_SHARE * whole}
    return named if whole > 0 and sum(named.values()) >= _EXPLAINED * whole else {}


def memory_reason(small: Line, large: Line) -> str:
    """Return the sentence on what `large` has more of at its peak; empty where the parts are not known."""
    small_row, large_row = small.peak_run.row, large.peak_run.row
    difference = (large.peak or 0) - (small.peak or 0)
    names = {name: title for part, title in PEAK_TITLES.items() if (name := f"at_peak_{part}_bytes") in large_row}
    more = {title: (large_row.get(name) or 0) - (small_row.get(name) or 0) for name, title in names.items()}
    parts = _largest(more, difference)
    if not parts:
        return ""
    unit = byte_unit([difference, *parts.values()])
    whole, *numbers = format_numbers([difference, *parts.values()], unit)
    opposite, size = min(more.items(), key=lambda item: item[1])
    has_less = sum(parts.values()) > difference and size < 0
    return sentence(
        "memory_reason",
        small=small,
        large=large,
        unit=unit.name,
        whole=whole,
        parts=dict(zip(parts, numbers, strict=True)),
        less=format_numbers([difference, -size], unit)[1] if has_less else "",
        opposite=opposite,
    )
