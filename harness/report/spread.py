"""The certainty of figures: repeated runs merged into one line, their spread, and ratios that it leaves unsettled."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from harness.records.columns import columns_aggregated_by
from harness.records.provenance import versions
from harness.records.schema import Record, Row
from harness.report.comparability import group_by, repeat_key
from harness.report.labels import STEP_PARTS

# The explanation of the marks in the comparison.
HOW_TO_READ = (
    "Repeats of a configuration share a row: the median of speed and time over the runs that ended ok, and the maximum"
    " of memory and deviations. ± is half the range of their tokens per second over the median. A ~ behind a ratio of"
    " tokens per second means that it is not certain which is faster, because the difference is within the spread of"
    " the two rows; a spread that is not known marks nothing. The spread of a row is ± where at least two runs ended"
    " ok, and otherwise half the interquartile range of the run's step times over their median, which does not tell how"
    " runs differ: for that, repeat them (repeats=3)."
)

# The parts of a step add up within one run only, so that no median represents them, and neither one of its percentile.
_WITHIN_RUN = {*STEP_PARTS, "overlapped_communication_seconds", "step_seconds_p95"}

_MEDIAN = set(columns_aggregated_by("median")) - _WITHIN_RUN

_MAXIMUM = columns_aggregated_by("maximum")


def merge_repeats(records: Sequence[Record]) -> list[Record]:
    """Return the lines of a comparison, in the order of their first runs: runs that differ only in `repeat` are one.

    A line is a record with the merged row of its runs, and `runs`, the records it represents. The row gains `runs`,
    `runs_alike` (how many of them ended with the line's status) and `between_runs` (their relative spread).
    """
    installed = versions()
    lines: list[Record] = []
    for runs in group_by(records, lambda record: repeat_key(record, installed)).values():
        # If one repeat occurs twice, its runs differ in something that no record has, such as their training text.
        are_distinct = len({_repeat(run) for run in runs}) < len(runs)
        lines += [_merge([run]) for run in runs] if are_distinct else [_merge(runs)]
    return lines


def _repeat(record: Record) -> Any:
    """Return the repeat index; that of a row whose values were rejected is in its configuration only."""
    repeat = record.row.get("repeat")
    return record.config.get("repeat") if repeat is None else repeat


def _merge(runs: Sequence[Record]) -> Record:
    """Return the line of repeated runs: `ok` if any run is, else the most frequent status; figures are of its runs."""
    statuses = [run.status for run in runs]
    status = "ok" if "ok" in statuses else max(statuses, key=statuses.count)
    rows: list[Row] = [run.row for run in runs if run.status == status]
    merged = dict(rows[0]) if len(rows) == 1 else _merge_rows(rows)
    merged |= {"run_id": rows[0]["run_id"], "runs": len(runs), "runs_alike": len(rows)}
    merged["between_runs"] = relative_range([row.get("tokens_per_second") for row in rows])
    disturbed = dict.fromkeys(str(run.row["noise_warning"]) for run in runs if run.row.get("noise_warning"))
    merged["noise_warning"] = "; ".join(disturbed) or None
    return dataclasses.replace(runs[0], row=merged, runs=list(runs))


def _merge_rows(rows: Sequence[Row]) -> Row:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _merge_values(name, [row.get(name) for row in rows]) for name in names}


def _merge_values(name: str, column: Sequence[Any]) -> Any:
    """Return one value for a column of several runs; None where they differ and no rule selects one.

    The parts of a peak or of a step add up within one run; as medians or maxima they would not.
    """
    if all(value == column[0] for value in column):
        return column[0]
    known = [value for value in column if value is not None]
    if name in _MEDIAN:
        return statistics.median(known)
    if name in _MAXIMUM or (name.endswith("_bytes") and not name.startswith("at_peak_")):
        return max(known)
    return None


def relative_range(numbers: Sequence[float | None]) -> float | None:
    """Return half the range over the median; None if fewer than two values are known."""
    known = [number for number in numbers if number]
    return (max(known) - min(known)) / 2 / statistics.median(known) if len(known) > 1 else None


def spread(row: Row) -> float | None:
    """Return how far a speed may lie to either side, relative to it.

    It is half the range between the line's runs, or for a single run half the interquartile range of its steps.
    """
    between, steps = row.get("between_runs"), row.get("step_seconds_iqr_ratio")
    return between if between is not None or steps is None else steps / 2


def is_unsettled(ratio: float | None, own: float | None, baseline: float | None) -> bool:
    """Return whether the intervals around two speeds overlap; an unknown spread counts as none.

    Args:
        ratio: The speed over the baseline's. The result is False where it is None.
        own: The relative spread of the speed, to either side.
        baseline: The relative spread of the baseline's speed, to either side.
    """
    if ratio is None:
        return False
    return abs(ratio - 1) < (own or 0.0) * ratio + (baseline or 0.0)
