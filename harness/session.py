"""One command: its runs in order, each shown while it works, their table at the end."""

import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from harness import compose, launch, machine, refused, run, worker
from harness.cli import each_repeat, sweep_size
from harness.config import ModelConfig, RunConfig
from harness.display import Display
from harness.errors import UserError, one_line
from harness.records import Record, read_all
from harness.report.files import write_files
from harness.report.tables import print_table, terminal
from harness.tracking.feed import Feed
from harness.typed import from_dict


class Session:
    """What the jobs of one command share. Hydra calls job() for each of them, in this process."""

    def __init__(self, arguments: Sequence[str], model_folder: Path) -> None:
        self.arguments = arguments
        self.model_folder = model_folder
        self.records: list[Record] = []
        self.folder: Path | None = None
        self.repeats: list[list[dict[str, Any]]] = []  # still to be run, of each combination
        self.is_sweep = False
        self.mistake: str | None = None  # kept, not raised: Hydra would add lines of its own to it
        self.display = Display()
        self.feed = Feed(self.display.say)
        self.begun: set[Path] = set()  # runs of which tracking knows, by their folders

    def job(self, composed: Any) -> None:
        """One combination; its repeats come when all others had their turn, so that they are not of one moment."""
        hydra_config = HydraConfig.get()
        self.is_sweep = hydra_config.mode == RunMode.MULTIRUN
        if self.mistake is not None:
            return
        try:
            values = compose.plain(composed)
            self.folder = compose.folder_of(values)
            repeats = each_repeat(values)
            self.display.total = len(repeats)
            if self.is_sweep:
                self.display.total = sweep_size(self.arguments, hydra_config.sweeper.params, len(repeats))
            self.display.repeated = len(repeats) > 1
            self.one(repeats[0], self.folder)
            self.repeats.append(repeats[1:])
        except UserError as error:
            self.mistake = str(error)

    def repeat(self) -> None:
        """The second run of every combination, then the third."""
        for turn in zip_longest(*self.repeats):
            for values in turn:
                if values is not None:
                    self.one(values, compose.folder_of(values))

    def one(self, values: dict[str, Any], folder: Path) -> None:
        """One run. Inside a sweep an impossible one is a row; alone it is a mistake."""
        self.display.position += 1
        record = self.run(values, folder)
        self.records.append(record)
        self.display.finished(record)
        run_dir = folder / record["row"]["run_id"]
        if run_dir in self.begun or record["row"]["status"] != "ok":  # else it is an earlier command's
            self.feed.end(values["tracking"], run_dir, record)
        if record["row"]["status"] == "interrupted":
            raise KeyboardInterrupt

    def run(self, values: dict[str, Any], folder: Path) -> Record:
        """The record of one combination. Raises UserError for a mistake that is no row."""
        config: RunConfig | None = None
        try:
            config = compose.run_config(values)
            found = machine.look(config.cluster)
            launch.prepare(found.device)
            planned = run.plan(config, found)
        except UserError as error:
            if not self.is_sweep:
                raise
            run.writable(folder)
            if config is None:
                return refused.values_only(values, str(error))
            return refused.combination(config, machine.look(config.cluster), str(error))
        run.writable(folder)
        with self.display.running(planned):

            def tick(run_dir: Path) -> None:
                self.display.tick(run_dir)
                if run_dir == planned.directory and run_dir not in self.begun:
                    self.begun.add(run_dir)
                    self.feed.begin(values["tracking"], run_dir, config.to_dict(), planned.run_id, config.name)

            return run.execute(planned, self.models(), tick, self.display.say, worker.main)

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
            if self.is_sweep or len(self.records) > 1:
                self.feed.table(self.records[-1]["config"]["tracking"], self.folder)
        self.feed.close()
        if self.mistake is not None:
            return self.refuse(self.mistake)
        statuses = {record["row"]["status"] for record in self.records}
        acceptable = {"ok", "oom", "refused"} if self.is_sweep else {"ok"}
        return 0 if statuses <= acceptable else 1

    def refuse(self, mistake: str) -> int:
        print(one_line(mistake), file=sys.stderr)
        return 2

    def interrupted(self) -> int:
        self.finish()
        return 130
