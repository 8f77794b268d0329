"""The data of a report: the runs of a folder, the lines that repeated runs make together, and what is best of them."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.records.schema import Record, Row, columns_aggregated_by
from harness.records.store import LoadedRecords
from harness.report.comparability import group_by, repeat_key
from harness.report.labels import STEP_TITLES, value_text
from harness.report.lines import Line, lines_of
from harness.report.ranking import Group, rank
from harness.report.speeds import timed_runs
from harness.util.text import count_text, join_words, sanitize

MOST = 200  # runs that tables show; findings consider all runs

MOST_GROUPS = 4  # groups of comparable configurations that have sentences, and rows in the table of what fits


@dataclass(frozen=True)
class View:
    """The runs of a report under one name: `records` has one for each run, and `lines` a line for all its repeats."""

    name: str
    records: Sequence[Record]
    problems: Sequence[str] = ()  # one line for each record that could not be read
    running: Sequence[str] = ()  # ids of runs that a command is executing
    folders: Mapping[str, Path] = field(default_factory=dict)  # of each run, by its id

    @cached_property
    def _ranked(self) -> tuple[list[Line], list[Group]]:
        return rank(lines_of(merge_repeats(self.records)))

    @property
    def lines(self) -> list[Line]:
        """A line for all repeats of a configuration: the median of speed and time, the maximum of memory."""
        return self._ranked[0]

    @property
    def groups(self) -> list[Group]:
        """What is best among comparable lines; the largest group first."""
        return self._ranked[1]

    @cached_property
    def largest_groups(self) -> list[Group]:
        """The largest groups of at least two lines, as many as have sentences."""
        return [group.relabelled() for group in self.groups if len(group.members) > 1][:MOST_GROUPS]

    @cached_property
    def runs(self) -> list[Line]:
        """A line for each run."""
        return lines_of(self.records)

    @cached_property
    def median_runs(self) -> list[Line]:
        """A line for one run of each line, the one with the median speed."""
        return lines_of([line.median_run for line in self.lines])

    @cached_property
    def peak_runs(self) -> list[Line]:
        """A line for one run of each line, the one with the largest peak."""
        return lines_of([line.peak_run for line in self.lines])

    @cached_property
    def draws_speeds(self) -> bool:
        """Whether the report is on speeds: two of them are ranked, or the only one, or some are of a model."""
        ok = [line.speed for line in self.lines if line.ok]
        ranked = sum(speed.is_ranked for speed in ok)
        return ranked > 1 or 0 < ranked == len(ok) or any(speed.is_simulated for speed in ok)

    def part(self, lines: Sequence[Line]) -> "View":
        """Return a view of these lines alone, whose ratios and places stay what they are in the whole view."""
        shown = {run.run_id for line in lines for run in line.runs}
        part = replace(self, records=[record for record in self.records if record.run_id in shown])
        part.__dict__["_ranked"] = lines, self.groups  # where cached_property looks
        return part


def truncate(whole: View, most: int) -> View:
    """Return a view of at most `most` runs: the fastest line of every strategy, the front, then others in order."""
    if len(whole.records) <= most:
        return whole

    def speed(line: Line) -> float:
        return line.get("tokens_per_second") or 0.0

    by_strategy = group_by(whole.lines, lambda line: line.get("strategy"))
    fastest = [max(lines, key=speed) for lines in by_strategy.values()]
    front = [line for line in whole.lines if line.is_on_front]
    shown: dict[Line, None] = {}
    runs = 0
    for line in dict.fromkeys((*[*fastest, *front][:most], *whole.lines)):
        runs += len(line.runs)
        if runs > most and shown:
            break
        shown[line] = None
    return whole.part([line for line in whole.lines if line in shown])


def view_of(*comparisons: tuple[Path, LoadedRecords]) -> View:
    """Return the view of all folders' runs. With several folders a run's id is preceded by its folder's name, NAME/RUN.

    A name that several folders share is replaced by their whole path.
    """
    names = [folder.resolve().name for folder, _ in comparisons]
    names = [
        str(folder) if names.count(name) > 1 else name for name, (folder, _) in zip(names, comparisons, strict=True)
    ]
    records, problems, running, folders = [], [], [], {}
    for name, (folder, loaded) in zip(names, comparisons, strict=True):
        prefix = f"{name}/" if len(comparisons) > 1 else ""
        for record in loaded.records:
            shown = record.with_row(run_id=f"{prefix}{record.run_id}", name=name) if prefix else record
            folders[shown.run_id] = folder / record.run_id
            records.append(shown)
        problems += loaded.problems
        running += [f"{prefix}{record.run_id}" for record in loaded.running]
    return View(" + ".join(names), records, problems, running, folders)


# The parts of a step add up within one run only, so that no median represents them, and neither one of its percentile.
_WITHIN_RUN = {*STEP_TITLES, "overlapped_communication_seconds", "step_seconds_p95"}

_MEDIAN = set(columns_aggregated_by("median")) - _WITHIN_RUN

_MAXIMUM = columns_aggregated_by("maximum")


def merge_repeats(records: Sequence[Record]) -> list[Record]:
    """Return the lines of a comparison, in the order of their first runs: runs that differ only in `repeat` are one.

    A line is a record with the merged row of its runs, and `runs`, the records it represents. The row gains `runs`,
    `runs_alike` (how many of them ended with the line's status) and `timed_runs` (how many its speed and times are of).
    It has a noise warning only if no run is undisturbed.
    """
    lines: list[Record] = []
    for runs in group_by(records, repeat_key).values():
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


_MOST_VALUES = 3  # of one part that are listed


def setting(view: View) -> str:
    """Return what was trained, in which precision, on how many ranks of which device, and when."""
    rows = [record.row for record in view.lines]
    ranks = sorted({row["world_size"] for row in rows if row.get("world_size")})
    days = sorted({str(run.row["started_at"])[:10] for run in view.records if run.row.get("started_at")})
    simulated = [line.is_simulated for line in view.lines]
    parts = [
        "Simulated, not measured" if simulated and all(simulated) else "Dashed: simulated" if any(simulated) else "",
        _some((model_name(line.record) for line in view.lines), "models"),
        _some((row.get("precision") for row in rows), "precisions"),
        f"{join_words([str(count) for count in ranks])} rank{'s' * (ranks != [1])}" if ranks else "",
        _some((_device(line.record) for line in view.lines), "devices"),
        " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
    ]
    return sanitize(" · ".join(part for part in parts if part))


def model_name(record: Record) -> str:
    """Return the name of the model that a run trained, with its size."""
    name, parameters = record.row.get("model"), record.row.get("parameters")
    size = f" ({value_text('parameters', parameters)})" if parameters else ""
    return f"{name}{size}" if name else ""


def _device(record: Record) -> str:
    """Return the name of the device that a run was measured on, and for a CPU its cores."""
    environment, measured_on = record.environment, record.row.get("measured_on")
    if measured_on != "cpu":
        return str(environment.get("device_name") or measured_on or "")
    cores, processor = environment.get("cores"), environment.get("processor")
    return "CPU" + (f" {processor}" if processor else "") + (f", {count_text(cores, 'core')}" if cores else "")


def _some(values: Iterable[object], noun: str) -> str:
    """Return the distinct values, or their number where they are many."""
    known = list(dict.fromkeys(str(value) for value in values if value))
    return join_words(known) if 0 < len(known) <= _MOST_VALUES else f"{len(known)} {noun}" if known else ""
