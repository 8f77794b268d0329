"""Repeated runs merged into one line: the median of speed and time over undisturbed runs, the maximum of memory."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from harness.records.columns import columns_aggregated_by
from harness.records.provenance import versions
from harness.records.schema import Record, Row
from harness.report.comparability import group_by, repeat_key
from harness.report.labels import STEP_PARTS
from harness.report.speeds import timed_runs

# The parts of a step add up within one run only, so that no median represents them, and neither one of its percentile.
_WITHIN_RUN = {*STEP_PARTS, "overlapped_communication_seconds", "step_seconds_p95"}

_MEDIAN = set(columns_aggregated_by("median")) - _WITHIN_RUN

_MAXIMUM = columns_aggregated_by("maximum")


def merge_repeats(records: Sequence[Record]) -> list[Record]:
    """Return the lines of a comparison, in the order of their first runs: runs that differ only in `repeat` are one.

    A line is a record with the merged row of its runs, and `runs`, the records it represents. The row gains `runs`,
    `runs_alike` (how many of them ended with the line's status) and `timed_runs` (how many its speed and times are of).
    It has a noise warning only if no run is undisturbed.
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
    timed: list[Row] = [run.row for run in timed_runs(runs)] or rows
    merged = dict(rows[0]) if len(rows) == 1 else _merge_rows(rows, timed)
    merged |= {"run_id": rows[0]["run_id"], "runs": len(runs), "runs_alike": len(rows)}
    merged["timed_runs"] = len(timed) if status == "ok" else None
    disturbed = dict.fromkeys(str(row["noise_warning"]) for row in timed if row.get("noise_warning"))
    merged["noise_warning"] = "; ".join(disturbed) or None
    return dataclasses.replace(runs[0], row=merged, runs=list(runs))


def _merge_rows(rows: Sequence[Row], timed: Sequence[Row]) -> Row:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: _merge_values(name, [row.get(name) for row in (timed if name in _MEDIAN else rows)]) for name in names
    }


def _merge_values(name: str, column: Sequence[Any]) -> Any:
    """Return one value for a column of several runs; None where they differ and no rule selects one.

    The parts of a peak or of a step add up within one run; as medians or maxima they would not.
    """
    if column.count(column[0]) == len(column):
        return column[0]
    known = [value for value in column if value is not None]
    if name in _MEDIAN:
        return statistics.median(known)
    if name in _MAXIMUM or (name.endswith("_bytes") and not name.startswith("at_peak_")):
        return max(known)
    return None
