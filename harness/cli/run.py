"""One command: its combinations collected, then run as one sweep, each shown while it works, their table at the end."""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.hydra import register_resolvers, to_container
from harness.config.locations import PACKAGED_CONF
from harness.config.overrides import composition_error, expand_repeats, normalize_overrides
from harness.records.run_folder import comparison_folder
from harness.records.runs_csv import rows_of, write_runs_csv
from harness.records.schema import Record
from harness.records.store import read_all
from harness.report.tables import print_table, terminal
from harness.report.view import View, view
from harness.runner.rejected import write_rejected
from harness.runner.resolve import load_model_presets
from harness.runner.reuse import ensure_writable
from harness.sweep import command_file, stop_after
from harness.sweep.display import ProgressDisplay
from harness.sweep.executors.base import Executor
from harness.sweep.executors.parallel import ParallelExecutor
from harness.sweep.executors.sequential import SequentialExecutor
from harness.sweep.queued_run import QueuedRun, deduplicate_and_sort
from harness.sweep.scheduler import Scheduler
from harness.sweep.slurm import executor, plugin
from harness.tracking.client import TrackingClient
from harness.util.errors import UserError, os_error_text
from harness.util.text import one_line


class RunCommand:
    """What the jobs of one command share. Hydra calls job() for each of them, in this process; then comes go()."""

    def __init__(self) -> None:
        self.requested: list[dict[str, Any]] = []  # the values of every combination
        self.queue: dict[str, Any] = {}  # the keys of hydra/launcher
        self.scripts: list[Path] = []  # to submit by hand
        self.records: list[Record] = []
        self.folder: Path | None = None
        self.is_sweep = False
        self.user_error: str | None = None  # kept, not raised: Hydra would add lines of its own to it
        self.display = ProgressDisplay(self.on_ranks_starting)
        self.tracking_client = TrackingClient(self.display.print_line)
        self.started_folders: set[Path] = set()  # runs of which tracking knows, by their folders

    def on_composed(self, composed: Any) -> None:
        """One combination, kept for later: which comes first depends on all of them."""
        hydra_config = HydraConfig.get()
        self.is_sweep = hydra_config.mode == RunMode.MULTIRUN
        if self.user_error is not None:
            return
        try:
            values = to_container(composed)
            if not self.is_sweep:  # who asks for one run wants it tried
                values["sweep"] |= {"skip_dominated": False}
            self.queue = to_container(hydra_config.launcher)
            self.folder = comparison_folder(values)
            self.requested.append(values)
            self.display.show_composed(len(self.requested))
        except UserError as error:
            self.user_error = str(error)

    def execute(self) -> None:
        """Runs them. Raises UserError for a mistake that is no row."""
        if self.user_error is not None:
            raise UserError(self.user_error)
        if not self.requested:  # Hydra was asked for something else, such as --cfg job
            return
        limits = stop_after.parse_stop_after(self.requested[0]["stop_after"])
        chosen = self.select_executor()
        runs_in_order = deduplicate_and_sort(self.plan_runs(chosen))
        if isinstance(chosen, executor.SlurmExecutor) and self.requested[0]["launch"] == "script":
            self.scripts = executor.write_scripts(chosen, runs_in_order)
            return
        self.display.set_queue(runs_in_order, chosen.max_parallel)
        with ExitStack() as shown:
            shown.callback(self.display.close)
            for folder in dict.fromkeys(item.folder for item in runs_in_order):
                ensure_writable(folder)
                runs = [
                    command_file.PlannedRun(item.name, item.cost) for item in runs_in_order if item.folder == folder
                ]
                shown.enter_context(command_file.register_command(folder, runs, chosen.max_parallel))
            Scheduler(chosen, self, limits, runs_in_order).run()

    def select_executor(self) -> Executor:
        """Where the runs are made."""
        if plugin.is_selected(self.queue) or self.requested[0]["launch"] == "script":
            return executor.SlurmExecutor(self.queue, self.display)
        parallel = self.requested[0]["sweep"]["parallel"]
        if parallel == 1:
            return SequentialExecutor(load_model_presets(), self.display)
        return ParallelExecutor(parallel, load_model_presets(), self.display)

    def plan_runs(self, place: Executor) -> list[QueuedRun]:
        """Every run of every combination. What is impossible is a row of a sweep at once, alone a mistake."""
        items = []
        self.display.total = sum(len(expand_repeats(values)) for values in self.requested)
        for values in self.requested:
            for turn, one in enumerate(expand_repeats(values)):
                try:
                    items.append(place.plan_item(one, turn))
                except UserError as error:
                    if not self.is_sweep:
                        raise
                    record = write_rejected(one, str(error))
                    self.records.append(record)
                    self.display.run_rejected(record)
                    self.tracking_client.finish_run(one["tracking"], comparison_folder(one) / record["row"]["run_id"])
        return items

    def on_started(self, item: QueuedRun) -> None:
        self.display.run_started(item)

    def on_record(self, item: QueuedRun, record: Record, is_new: bool) -> None:
        """A run has its record: made now, or on file."""
        self.records.append(record)
        self.display.run_ended(item, record, is_new)
        run_dir = item.folder / record["row"]["run_id"]
        if is_new or run_dir in self.started_folders:  # else an earlier command has handed it over
            self.tracking_client.finish_run(record["config"]["tracking"], run_dir)

    def on_ranks_starting(self, item: QueuedRun, run_dir: Path) -> None:
        """The ranks of a run are being started; its folder is there, and nothing of an earlier one."""
        self.started_folders.add(run_dir)
        config = item.config.to_dict()
        self.tracking_client.start_run(config["tracking"], run_dir, config)

    def log(self, line: str) -> None:
        self.display.print_line(line)

    def finish(self) -> int:
        """Prints the table of this command's runs and writes the report of the whole folder; the exit status."""
        if self.records and self.folder is not None:
            seen = view(self.folder, read_all(self.folder))
            print_table(seen, terminal(), [record["row"]["run_id"] for record in self.records])
            for path in self.files(seen):
                print(path)
            if self.is_sweep or len(self.records) > 1:
                self.tracking_client.log_table(self.records[-1]["config"]["tracking"], self.folder)
        self.tracking_client.close()
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

    def reject(self, mistake: str) -> int:
        print(one_line(mistake), file=sys.stderr)
        return 2

    def interrupted(self) -> int:
        self.finish()
        return 130


def main(arguments: Sequence[str]) -> int:
    """Run what the overrides describe.

    Return 0 if all runs are ok or refused as measured, 1 for a failure among the rows, 2 for a mistake in the command,
    130 if interrupted.
    """
    command = RunCommand()
    before, sys.argv = sys.argv, ["harness", *normalize_overrides(arguments)]  # Hydra reads the process's arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors to us instead of printing them its own way
    register_resolvers()
    plugin.register_launcher()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            OmegaConf.register_new_resolver("harness.scratch", lambda: scratch, replace=True)
            hydra.main(version_base="1.3", config_path=str(PACKAGED_CONF), config_name="config")(command.on_composed)()
        command.execute()
        return command.finish()
    except (HydraException, OmegaConfBaseException) as error:
        return command.reject(composition_error(error))
    except UserError as error:
        return command.reject(str(error))
    except OSError as error:  # a disk that is full, or was made read-only meanwhile
        return command.reject(os_error_text(error))
    except KeyboardInterrupt:
        return command.interrupted()
    finally:
        sys.argv = before
