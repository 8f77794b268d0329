"""What a report is made from: the runs of a folder, the lines that repeated runs make together, and their frames."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from harness.records.schema import Record
from harness.records.store import LoadedRecords
from harness.report import frame
from harness.report.spread import merge_repeats

MOST = 200  # runs of which tables show rows; findings are of all


@dataclass(frozen=True)
class View:
    """The runs under one name; `records` and `table` have a row a run, `lines` and `middles` one for all its repeats.

    `middles` has of every line the median speed and time, the maximum of memory and deviations (spread.merged).
    """

    name: str
    records: Sequence[Record]
    problems: Sequence[str] = ()  # a line each: records that could not be read
    running: Sequence[str] = ()  # ids of runs that a command is at
    folders: Mapping[str, Path] = field(default_factory=dict)  # of each run, by its id

    @cached_property
    def table(self) -> pd.DataFrame:
        return frame.records_frame(self.records)

    @cached_property
    def lines(self) -> list[Record]:
        return merge_repeats(self.records)

    @cached_property
    def line_medians(self) -> pd.DataFrame:
        return frame.records_frame(self.lines)

    @cached_property
    def median_runs(self) -> "View":
        """One run of every line: what a run's parts add up to holds in one run alone."""
        return replace(self, records=[median_run(line) for line in self.lines])

    def part(self, run_ids: Collection[str], lines: Sequence[int]) -> "View":
        """Of these runs and lines alone; what lines are measured against stays, though it may not be among them."""
        rows = [position for position, record in enumerate(self.records) if record["row"]["run_id"] in run_ids]
        found = replace(self, records=[self.records[position] for position in rows])
        known = {
            "lines": [self.lines[position] for position in lines],
            "middles": self.line_medians.iloc[list(lines)].reset_index(drop=True),
        }
        found.__dict__.update(known)  # where cached_property looks first
        return found


def median_run(line: Record) -> Record:
    """Of a line's runs that ended as it did, the one whose speed is in the middle."""
    runs: list[Record] = [run for run in line["runs"] if run["row"]["status"] == line["row"]["status"]]
    return sorted(runs, key=_speed)[(len(runs) - 1) // 2]


def truncate(whole: View, most: int) -> View:
    """The view of at most so many of its lines and their runs: the fastest of every strategy, then in their order."""
    if len(whole.records) <= most:
        return whole
    fastest: dict[Any, int] = {}
    for position, line in enumerate(whole.lines):
        best = fastest.setdefault(line["row"].get("strategy"), position)
        if _speed(line) > _speed(whole.lines[best]):
            fastest[line["row"].get("strategy")] = position
    first = list(fastest.values())[:most]
    chosen: list[int] = []
    runs = 0
    for position in dict.fromkeys((*first, *range(len(whole.lines)))):
        runs += len(whole.lines[position]["runs"])
        if runs > most and chosen:
            break
        chosen.append(position)
    kept = {run["row"]["run_id"] for position in chosen for run in whole.lines[position]["runs"]}
    return whole.part(kept, sorted(chosen))


def _speed(line: Record) -> float:
    return line["row"].get("tokens_per_second") or 0.0


def view(folder: Path, found: LoadedRecords) -> View:
    """What was found in one folder, results/NAME."""
    running = [record["row"]["run_id"] for record in found.running]
    folders = {run_id: folder / run_id for run_id in (record["row"]["run_id"] for record in found.records)}
    return View(folder.resolve().name, found.records, found.problems, running, folders)


def merge_folders(found: Sequence[tuple[Path, LoadedRecords]]) -> View:
    """The view of all folders' runs; of several folders a run's id begins with its folder's name, NAME/RUN.

    A name that several folders share is their whole path.
    """
    if len(found) == 1:
        return view(*found[0])
    names = [folder.resolve().name for folder, _ in found]
    names = [str(folder) if names.count(name) > 1 else name for (folder, _), name in zip(found, names, strict=True)]
    records, problems, running, folders = [], [], [], {}
    for name, (folder, its) in zip(names, found, strict=True):
        for record in its.records:
            run_id = f"{name}/{record['row']['run_id']}"
            folders[run_id] = folder / record["row"]["run_id"]
            records.append(_renamed(record, run_id, name))
        problems += its.problems
        running += [f"{name}/{record['row']['run_id']}" for record in its.running]
    return View(" + ".join(names), records, problems, running, folders)


def _renamed(record: Record, run_id: str, name: str) -> Record:
    return record | {"row": record["row"] | {"run_id": run_id, "name": name}}
