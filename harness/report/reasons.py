"""The reasons of what is fastest and smallest: the parts of a step that are longer, and of a peak that are larger."""

from collections.abc import Mapping

from harness.cost_model.parts import PEAK_TITLES
from harness.records.schema import Record
from harness.report.labels import STEP_TITLES
from harness.report.lines import Line
from harness.report.sentences import sentence

# A part is named if it is at least this share of the difference; the named ones are at least EXPLAINED of it.
_LEAST_SHARE, _EXPLAINED = 0.2, 0.5

_MOST_PARTS = 2

_MORE_OPERATIONS = 1.02  # times as many, that a sentence names


def step_reason(fast: Line, slow: Line) -> str:
    """Return the sentence on why a step of `slow` is longer; empty where no part of the step explains it.

    A part explains it if it is longer in the median runs, and in every run of `slow` longer than in any run of `fast`.
    """
    longer = {
        title: name for name, title in STEP_TITLES.items() if min(_seconds(slow, name)) > max(_seconds(fast, name))
    }
    differences = _differences(slow.median_run, fast.median_run, {"step": "step_seconds", **longer})
    parts, operations = _largest(differences, "step"), slow.ratio("executed_flops", fast) or 1.0
    recomputed = operations if operations > _MORE_OPERATIONS else None
    facts = {"fast": fast, "slow": slow, "difference": differences["step"], "recomputed": recomputed}
    return sentence("step_reason", parts=parts, **facts) if parts else ""


def _seconds(line: Line, name: str) -> list[float]:
    return [run.row.get(name) or 0.0 for run in line.timed]


def _differences(large: Record, small: Record, columns: Mapping[str, str]) -> dict[str, float]:
    """Return how much larger columns of one run are than another's: parts add up within one run only."""
    return {title: (large.row.get(name) or 0) - (small.row.get(name) or 0) for title, name in columns.items()}


def _largest(differences: Mapping[str, float], whole: str) -> dict[str, float]:
    """Return the largest parts of the whole difference, if together they explain it; none if there is no difference."""
    parts = [item for item in differences.items() if item[0] != whole]
    ordered = sorted(parts, key=lambda item: -item[1])[:_MOST_PARTS]
    named = {title: part for title, part in ordered if part >= _LEAST_SHARE * differences[whole]}
    return named if 0 < _EXPLAINED * differences[whole] <= sum(named.values()) else {}


def memory_reason(small: Line, large: Line) -> str:
    """Return the sentence on what `large` has more of at its peak; empty where the parts are not known."""
    columns = {title: f"at_peak_{part}_bytes" for part, title in PEAK_TITLES.items()}
    known = {title: name for title, name in columns.items() if name in large.peak_run.row}
    differences = _differences(large.peak_run, small.peak_run, {"peak": "peak_allocated_bytes", **known})
    parts, opposite = _largest(differences, "peak"), min(differences, key=lambda title: differences[title])
    difference = differences["peak"]
    less = max(-differences[opposite], 0) if sum(parts.values()) > difference else 0
    facts = {"difference": difference, "parts": parts, "less": less, "opposite": opposite}
    return sentence("memory_reason", small=small, large=large, **facts) if parts else ""
