"""What a report is made from: the runs of a folder, the lines that repeated runs make together, and their frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from harness.records import Found, Record
from harness.report import comparison as c
from harness.report.spread import merged


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
        return c.frame(self.records)

    @cached_property
    def lines(self) -> list[Record]:
        return merged(self.records)

    @cached_property
    def middles(self) -> pd.DataFrame:
        return c.frame(self.lines)


def view(folder: Path, found: Found) -> View:
    """What was found in one folder, results/NAME."""
    running = [record["row"]["run_id"] for record in found.running]
    folders = {run_id: folder / run_id for run_id in (record["row"]["run_id"] for record in found.records)}
    return View(folder.resolve().name, found.records, found.problems, running, folders)
