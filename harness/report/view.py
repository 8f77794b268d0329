"""The data of a report: the runs of a folder, the lines that repeated runs make together, and their frames."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from harness.records.schema import Record
from harness.records.store import LoadedRecords
from harness.report.frame import records_frame
from harness.report.ranking import Ranking, rank
from harness.report.repeats import merge_repeats
from harness.report.speeds import timed_runs

MOST = 200  # runs that tables show; findings consider all runs


@dataclass(frozen=True)
class View:
    """The runs of a report under one name.

    `records` and `table` have one row per run, `lines` and `line_medians` one for all repeats of a run.
    """

    name: str
    records: Sequence[Record]
    problems: Sequence[str] = ()  # one line for each record that could not be read
    running: Sequence[str] = ()  # ids of runs that a command is executing
    folders: Mapping[str, Path] = field(default_factory=dict)  # of each run, by its id

    @cached_property
    def table(self) -> pd.DataFrame:
        """A frame with one row per run."""
        return records_frame(self.records)

    @cached_property
    def lines(self) -> list[Record]:
        """The runs with repeats merged, see `merge_repeats`."""
        return merge_repeats(self.records)

    @cached_property
    def line_medians(self) -> pd.DataFrame:
        """A frame with one row per line: the median of speed and time, the maximum of memory and deviations."""
        return records_frame(self.lines)

    @cached_property
    def ranking(self) -> Ranking:
        """What is best among comparable lines, and the place of every line."""
        return rank(self.lines)

    @cached_property
    def draws_speeds(self) -> bool:
        """Whether charts have speeds and times: only if some speeds are ranked, or all are those of a model."""
        speeds = [standing.speed for standing in self.ranking.standings if standing.speed]
        return any(speed.is_ranked or speed.is_simulated for speed in speeds)

    @cached_property
    def median_runs(self) -> "View":
        """A view of one run for each line: the parts of a step or of a peak add up within one run only."""
        return replace(self, records=[median_run(line) for line in self.lines])

    @cached_property
    def peak_runs(self) -> "View":
        """A view of the run with the largest peak of each line."""
        return replace(self, records=[peak_run(line) for line in self.lines])

    def part(self, run_ids: Collection[str], lines: Sequence[int]) -> "View":
        """Return a view of these runs and these lines alone.

        Ratios and places among comparable lines stay what they are in the whole view.
        """
        rows = [position for position, record in enumerate(self.records) if record.run_id in run_ids]
        view = replace(self, records=[self.records[position] for position in rows])
        cached = {
            "lines": [self.lines[position] for position in lines],
            "ranking": self.ranking.part(lines),
            "line_medians": self.line_medians.iloc[list(lines)].reset_index(drop=True),
        }
        view.__dict__.update(cached)  # where cached_property looks first
        return view


def median_run(line: Record) -> Record:
    """Return the run of a line with the median speed, among the undisturbed ones if there are any."""
    runs = timed_runs(line.runs) or [run for run in line.runs if run.status == line.status]
    return sorted(runs, key=_speed)[(len(runs) - 1) // 2]


def peak_run(line: Record) -> Record:
    """Return the run of a line with the largest peak."""
    runs = [run for run in line.runs if run.status == line.status] or [line]
    return max(runs, key=lambda run: run.row.get("peak_allocated_bytes") or 0)


def truncate(whole: View, most: int) -> View:
    """Return a view of at most `most` runs: the fastest line of every strategy, the front, then others in order."""
    if len(whole.records) <= most:
        return whole
    fastest: dict[Any, int] = {}
    for position, line in enumerate(whole.lines):
        best = fastest.setdefault(line.row.get("strategy"), position)
        if _speed(line) > _speed(whole.lines[best]):
            fastest[line.row.get("strategy")] = position
    front = [position for position, standing in enumerate(whole.ranking.standings) if standing.is_on_front]
    first = [*fastest.values(), *front][:most]
    positions: list[int] = []
    runs = 0
    for position in dict.fromkeys((*first, *range(len(whole.lines)))):
        runs += len(whole.lines[position].runs)
        if runs > most and positions:
            break
        positions.append(position)
    run_ids = {run.run_id for position in positions for run in whole.lines[position].runs}
    return whole.part(run_ids, sorted(positions))


def _speed(line: Record) -> float:
    return line.row.get("tokens_per_second") or 0.0


def view(folder: Path, loaded: LoadedRecords) -> View:
    """Return the view of one folder, results/NAME."""
    running = [record.run_id for record in loaded.running]
    folders = {run_id: folder / run_id for run_id in (record.run_id for record in loaded.records)}
    return View(folder.resolve().name, loaded.records, loaded.problems, running, folders)


def merge_folders(comparisons: Sequence[tuple[Path, LoadedRecords]]) -> View:
    """Return the view of all folders' runs. With several folders a run's id is preceded by its folder's name, NAME/RUN.

    A name that several folders share is replaced by their whole path.
    """
    if len(comparisons) == 1:
        return view(*comparisons[0])
    names = [folder.resolve().name for folder, _ in comparisons]
    names = [
        str(folder) if names.count(name) > 1 else name for (folder, _), name in zip(comparisons, names, strict=True)
    ]
    records, problems, running, folders = [], [], [], {}
    for name, (folder, loaded) in zip(names, comparisons, strict=True):
        for record in loaded.records:
            run_id = f"{name}/{record.run_id}"
            folders[run_id] = folder / record.run_id
            records.append(_rename(record, run_id, name))
        problems += loaded.problems
        running += [f"{name}/{record.run_id}" for record in loaded.running]
    return View(" + ".join(names), records, problems, running, folders)


def _rename(record: Record, run_id: str, name: str) -> Record:
    return record.with_row(run_id=run_id, name=name)
