"""One command: its combinations collected, then run as one sweep, each shown while it works, their table at the end."""

import dataclasses
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from harness import budget, compose, progress, refused, run, search, stored
from harness.cli import each_repeat
from harness.config import ModelConfig, RunConfig
from harness.display import Display
from harness.errors import UserError, one_line
from harness.machine import look
from harness.records import Record, read_all
from harness.report.files import write_files
from harness.report.tables import print_table, terminal
from harness.slots import Slots
from harness.sweep import Here, Item, Place, Sweep, in_order
from harness.tracking import tracker
from harness.typed import from_dict


class Session:
    """What the jobs of one command share. Hydra calls job() for each of them, in this process; then comes go()."""

    def __init__(self, model_folder: Path) -> None:
        self.model_folder = model_folder
        self.asked: list[dict[str, Any]] = []  # the values of every combination
        self.records: list[Record] = []
        self.folder: Path | None = None
        self.is_sweep = False
        self.mistake: str | None = None  # kept, not raised: Hydra would add lines of its own to it
        self.display = Display()

    def job(self, composed: Any) -> None:
        """One combination, kept for later: which comes first depends on all of them."""
        self.is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        if self.mistake is not None:
            return
        try:
            values = compose.plain(composed)
            self.folder = compose.folder_of(values)
            self.asked.append(values)
        except UserError as error:
            self.mistake = str(error)

    def go(self) -> None:
        """Runs them. Raises UserError for a mistake that is no row."""
        if self.mistake is not None:
            raise UserError(self.mistake)
        limits = budget.parse(self.asked[0]["stop_after"]) if self.asked else budget.Budget()
        place = self.place()
        items = in_order(self.items(place))
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
        parallel = self.asked[0]["sweep"]["parallel"] if self.asked else 1
        if parallel == 1:
            return Here(self.models(), self.display)
        return Slots(parallel, self.models(), self.display)

    def items(self, place: Place) -> list[Item]:
        """Every run of every combination. What is impossible is a row of a sweep at once, alone a mistake."""
        items = []
        self.display.total = sum(len(each_repeat(values)) for values in self.asked)
        for values in self.asked:
            for turn, one in enumerate(each_repeat(values)):
                try:
                    items.append(self.item(one, turn, place))
                except UserError as error:
                    if not self.is_sweep:
                        raise
                    self.refused(one, str(error))
        return items

    def item(self, values: dict[str, Any], turn: int, place: Place) -> Item:
        if search.is_asked(values):
            found = search.Search(search.planned(values, lambda one: self.plan(self.config(one), place)), run.fits)
            return Item(found.first.config, found.first, found.first.run_id, turn, found)
        planned = self.plan(self.config(values), place)
        return Item(planned.config, planned, planned.run_id, turn)

    def config(self, values: dict[str, Any]) -> RunConfig:
        config = compose.run_config(values)
        if self.is_sweep:
            return config
        # Who asks for one run wants it tried.
        return dataclasses.replace(config, sweep=dataclasses.replace(config.sweep, skip_dominated=False))

    def plan(self, config: RunConfig, place: Place) -> run.Plan:
        return run.plan(config, place.machine(config.cluster))

    def refused(self, values: dict[str, Any], reason: str) -> None:
        """The row of what cannot be run."""
        stored.writable(compose.folder_of(values))
        try:
            config = compose.run_config(values)
            record = refused.combination(config, look(config.cluster), reason)
        except UserError:
            record = refused.values_only(values, reason)
        self.records.append(record)
        self.display.refused(record)

    def begins(self, item: Item) -> None:
        self.display.begins(item)

    def has(self, item: Item, record: Record, is_new: bool) -> None:
        """A run has its record: made now, or on file."""
        self.records.append(record)
        self.display.ended(item, record, is_new)
        if is_new:
            word = tracker(record["config"]["tracking"]).log(item.folder / record["row"]["run_id"], record)
            if word:
                self.say(word)

    def say(self, line: str) -> None:
        self.display.say(line)

    def models(self) -> list[ModelConfig]:
        """The models there are, for saying which would fit."""
        paths = sorted(self.model_folder.glob("*.yaml"))
        found = [yaml.safe_load(path.read_text()) for path in paths]
        return [from_dict(ModelConfig, values) for values in found if values["family"] != "hf"]  # of a size yet unknown

    def finish(self) -> int:
        """Prints the table of this command's runs and writes the report of the whole folder; the exit status."""
        if self.records and self.folder is not None:
            found = read_all(self.folder)
            print_table(found.records, terminal(), [record["row"]["run_id"] for record in self.records])
            for path in write_files(self.folder, found):
                print(path)
        statuses = {record["row"]["status"] for record in self.records}
        acceptable = {"ok", "oom", "refused"} if self.is_sweep else {"ok"}
        return 0 if statuses <= acceptable else 1

    def refuse(self, mistake: str) -> int:
        print(one_line(mistake), file=sys.stderr)
        return 2

    def interrupted(self) -> int:
        self.finish()
        return 130
