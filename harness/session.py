"""One command: its combinations collected, then run as one sweep, each shown while it works, their table at the end."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from harness import budget, compose, progress, refused, slurm, stored
from harness.cli import each_repeat
from harness.display import Display
from harness.errors import UserError, one_line
from harness.here import Here
from harness.items import Item, in_order
from harness.records import Record, read_all, rows_of, write_runs_csv
from harness.report.tables import print_table, terminal
from harness.report.view import View, view
from harness.slots import Slots
from harness.sweep import Place, Sweep
from harness.tracking.feed import Feed


class Session:
    """What the jobs of one command share. Hydra calls job() for each of them, in this process; then comes go()."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []  # the values of every combination
        self.queue: dict[str, Any] = {}  # the keys of hydra/launcher
        self.scripts: list[Path] = []  # to submit by hand
        self.records: list[Record] = []
        self.folder: Path | None = None
        self.is_sweep = False
        self.mistake: str | None = None  # kept, not raised: Hydra would add lines of its own to it
        self.display = Display(self.started)
        self.feed = Feed(self.display.say)
        self.begun: set[Path] = set()  # runs of which tracking knows, by their folders

    def job(self, composed: Any) -> None:
        """One combination, kept for later: which comes first depends on all of them."""
        hydra_config = HydraConfig.get()
        self.is_sweep = hydra_config.mode == RunMode.MULTIRUN
        if self.mistake is not None:
            return
        try:
            values = compose.plain(composed)
            if not self.is_sweep:  # who asks for one run wants it tried
                values["sweep"] |= {"skip_dominated": False}
            self.queue = compose.plain(hydra_config.launcher)
            self.folder = compose.folder_of(values)
            self.asked.append(values)
            self.display.composed(len(self.asked))
        except UserError as error:
            self.mistake = str(error)

    def go(self) -> None:
        """Runs them. Raises UserError for a mistake that is no row."""
        if self.mistake is not None:
            raise UserError(self.mistake)
        if not self.asked:  # Hydra was asked for something else, such as --cfg job
            return
        limits = budget.parse(self.asked[0]["stop_after"])
        place = self.place()
        items = in_order(self.items(place))
        if isinstance(place, slurm.Slurm) and self.asked[0]["launch"] == "script":
            self.scripts = slurm.write_scripts(place, items)
            return
        self.display.expect(items, place.side_by_side)
        with ExitStack() as shown:
            shown.callback(self.display.close)
            for folder in dict.fromkeys(item.folder for item in items):
                stored.writable(folder)
                runs = [progress.Listed(item.name, item.cost) for item in items if item.folder == folder]
                shown.enter_context(progress.listed(folder, runs, place.side_by_side))
            Sweep(place, self, limits, items).go()

    def place(self) -> Place:
        """Where the runs are made."""
        if slurm.is_asked_for(self.queue) or self.asked[0]["launch"] == "script":
            return slurm.Slurm(self.queue, self.display)
        parallel = self.asked[0]["sweep"]["parallel"]
        if parallel == 1:
            return Here(compose.models(), self.display)
        return Slots(parallel, compose.models(), self.display)

    def items(self, place: Place) -> list[Item]:
        """Every run of every combination. What is impossible is a row of a sweep at once, alone a mistake."""
        items = []
        self.display.total = sum(len(each_repeat(values)) for values in self.asked)
        for values in self.asked:
            for turn, one in enumerate(each_repeat(values)):
                try:
                    items.append(place.item(one, turn))
                except UserError as error:
                    if not self.is_sweep:
                        raise
                    record = refused.row_of(one, str(error))
                    self.records.append(record)
                    self.display.refused(record)
                    self.feed.end(one["tracking"], compose.folder_of(one) / record["row"]["run_id"])
        return items

    def begins(self, item: Item) -> None:
        self.display.begins(item)

    def has(self, item: Item, record: Record, is_new: bool) -> None:
        """A run has its record: made now, or on file."""
        self.records.append(record)
        self.display.ended(item, record, is_new)
        run_dir = item.folder / record["row"]["run_id"]
        if is_new or run_dir in self.begun:  # else an earlier command has handed it over
            self.feed.end(record["config"]["tracking"], run_dir)

    def started(self, item: Item, run_dir: Path) -> None:
        """The ranks of a run are being started; its folder is there, and nothing of an earlier one."""
        self.begun.add(run_dir)
        config = item.config.to_dict()
        self.feed.begin(config["tracking"], run_dir, config)

    def say(self, line: str) -> None:
        self.display.say(line)

    def finish(self) -> int:
        """Prints the table of this command's runs and writes the report of the whole folder; the exit status."""
        if self.records and self.folder is not None:
            seen = view(self.folder, read_all(self.folder))
            print_table(seen, terminal(), [record["row"]["run_id"] for record in self.records])
            for path in self.files(seen):
                print(path)
            if self.is_sweep or len(self.records) > 1:
                self.feed.table(self.records[-1]["config"]["tracking"], self.folder)
        self.feed.close()
        for path in self.scripts:
            print(f"sbatch {path}")
        statuses = {record["row"]["status"] for record in self.records}
        acceptable = {"ok", "oom", "refused"} if self.is_sweep else {"ok"}
        return 0 if statuses <= acceptable else 1

    def files(self, seen: View) -> list[Path]:
        """A sweep ends with the whole report, a single run with its row: drawing takes seconds."""
        assert self.folder is not None
        if not self.is_sweep:
            return [write_runs_csv(self.folder, rows_of(seen.records))]
        from harness.report.files import write_files

        return write_files(self.folder, seen)

    def refuse(self, mistake: str) -> int:
        print(one_line(mistake), file=sys.stderr)
        return 2

    def interrupted(self) -> int:
        self.finish()
        return 130
