"""One command: its runs in order, each shown while it works, their table at the end."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from harness import config as configuration
from harness import launch, machine, run, worker
from harness.cli import sweep_size
from harness.config import ModelConfig, RunConfig
from harness.display import Display
from harness.errors import UserError, one_line
from harness.records import Record, read_all
from harness.report.files import write_files
from harness.report.tables import print_table, terminal
from harness.tracking import tracker


class Session:
    """What the jobs of one command share. Hydra calls run() for each of them, in this process."""

    def __init__(self, arguments: Sequence[str], model_folder: Path) -> None:
        self.arguments = arguments
        self.model_folder = model_folder
        self.records: list[Record] = []
        self.results: Path | None = None
        self.is_sweep = False
        self.mistake: str | None = None
        self.display = Display()

    def run(self, composed: Any) -> None:
        """One combination. Inside a sweep an impossible one is a row; alone it is a mistake."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra_config = HydraConfig.get()
        self.is_sweep = hydra_config.mode == RunMode.MULTIRUN
        try:
            config = configuration.from_omegaconf(composed)
            found = machine.look(config.cluster)
            launch.prepare(found.device)
            self.display.total = sweep_size(self.arguments, hydra_config.sweeper.params) if self.is_sweep else 1
            self.results = Path(config.results) / config.name
            self.one(config, found)
        except UserError as error:
            self.mistake = str(error)
            if self.is_sweep:
                raise

    def one(self, config: RunConfig, found: machine.Machine) -> None:
        try:
            planned = run.plan(config, found)
        except UserError as error:
            if not self.is_sweep:
                raise
            self.records.append(run.refuse(config, found, str(error)))
        else:
            with self.display.running(planned):
                record = run.execute(planned, self.models(), self.display.tick, self.display.say, worker.main)
            self.records.append(record)
        self.display.finished(self.records[-1])
        folder = Path(config.results) / config.name / self.records[-1]["row"]["run_id"]
        word = tracker(config.tracking).log(folder, self.records[-1])
        if word:
            self.display.say(word)

    def models(self) -> list[ModelConfig]:
        """The models there are, for saying which would fit."""
        paths = sorted(self.model_folder.glob("*.yaml"))
        return [configuration.from_dict(ModelConfig, yaml.safe_load(path.read_text())) for path in paths]

    def finish(self) -> int:
        """Prints the table of this command's runs and writes the report of the whole folder."""
        if self.mistake is not None:
            return self.refuse(self.mistake)
        if not self.records or self.results is None:
            return 0  # --help and --cfg run nothing
        print_table(read_all(self.results).records, terminal(), [record["row"]["run_id"] for record in self.records])
        for path in write_files(self.results):
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
