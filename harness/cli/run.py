"""The second half of the command that makes runs: they are planned, run as one sweep, shown, and compared in a table.

The first half, harness.cli.compose, has composed their configurations.
"""

import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.cli.compose import Combinations
from harness.config.command import merge_values
from harness.config.from_dict import ConfigValues
from harness.config.hydra import expand_repeats
from harness.launcher.signals import ignore_all_but_sigint, restored_handlers, set_handlers
from harness.records.run_folder import comparison_folder
from harness.records.schema import Record
from harness.records.store import read_runs, rows_of, write_runs_csv
from harness.report.tables import print_answers, print_table, terminal
from harness.report.view import view_of
from harness.runner.record import write_rejected
from harness.runner.resolve import load_model_presets
from harness.runner.reuse import ensure_writable
from harness.sweep.command_file import PlannedRun, register_command
from harness.sweep.display import ProgressDisplay
from harness.sweep.jobs.executor import JobExecutor
from harness.sweep.parallel import ParallelExecutor
from harness.sweep.queued_run import PlannedOrder, QueuedRun, deduplicate_and_sort, order_by_plan, parse_stop_after
from harness.sweep.scheduler import Executor, Scheduler, SequentialExecutor
from harness.tracking.client import TrackingClient
from harness.util.text import UserError

SWEEP_STATUSES = {"ok", "oom", "refused"}  # results of a sweep; any other status is a failure


class TrackedDisplay(ProgressDisplay):
    """The display of a command that also collects its records and hands its runs to the tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.tracking_client = TrackingClient(self.print_line)
        self.started_folders: set[Path] = set()  # the folders of runs that the tracker knows

    def ranks_starting(self, run: QueuedRun, run_dir: Path) -> None:
        """Track a run whose ranks are being started; its folder exists, and has nothing of an earlier attempt."""
        self.started_folders.add(run_dir)
        config = merge_values(run.config, run.command)
        self.tracking_client.hand_over("start_run", config["tracking"], run_dir, config)

    def run_ended(self, run: QueuedRun, record: Record) -> None:
        """Show and track a run's record. One that an earlier command made is tracked already."""
        self.records.append(record)
        is_new = run in self.running
        super().run_ended(run, record)
        run_dir = run.comparison.run(record.run_id).path
        if is_new or run_dir in self.started_folders:
            self.tracking_client.hand_over("finish_run", record.config["tracking"], run_dir)

    def reject(self, values: ConfigValues, reason: str) -> None:
        """Write the row of an impossible combination, and show and track it."""
        record = write_rejected(values, reason)
        self.records.append(record)
        self.run_rejected(record)
        comparison = comparison_folder(values["name"], values["results_dir"])
        self.tracking_client.hand_over("finish_run", values["tracking"], comparison.run(record.run_id).path)


@dataclass
class RunCommand:
    """One command that makes runs: execute() makes them, and finish() shows them."""

    combinations: Combinations
    job_commands: list[str] = field(default_factory=list)  # which submit the files of jobs
    display: TrackedDisplay = field(default_factory=TrackedDisplay)
    planned_order: PlannedOrder | None = None
    is_disk_full: bool = False

    def execute(self) -> None:
        """Make all runs, or write files of their jobs. Raises UserError for a mistake that does not become a row."""
        limits = parse_stop_after(self.combinations.requested[0]["stop_after"])
        executor = self.select_executor()
        runs = deduplicate_and_sort(self.plan_runs(executor))
        if isinstance(executor, JobExecutor) and not executor.cluster.submits:
            self.job_commands = executor.write_files(runs)
            return
        if self.combinations.is_sweep and runs and runs[0].command.plan.needs_predictions:
            self.planned_order = order_by_plan(runs, runs[0].command.plan)
            runs = self.planned_order.runs
            if self.planned_order.note:
                self.display.print_line(self.planned_order.note)
        self.display.set_queue(runs, executor.max_parallel)
        with ExitStack() as stack:
            stack.callback(self.display.close)
            for comparison in dict.fromkeys((self.combinations.comparison, *(run.comparison for run in runs))):
                ensure_writable(comparison)
                planned = [PlannedRun(run.name, run.cost) for run in runs if run.comparison == comparison]
                stack.enter_context(register_command(comparison, planned, executor.max_parallel))
            self.is_disk_full = Scheduler(executor, limits, runs).run()

    def select_executor(self) -> Executor:
        """Return the executor that makes the runs."""
        if self.combinations.is_for_cluster:
            return JobExecutor(self.combinations.launcher, self.display)
        parallel = self.combinations.requested[0]["sweep"]["parallel"]
        if parallel == 1:
            return SequentialExecutor(load_model_presets(), self.display)
        return ParallelExecutor(parallel, load_model_presets(), self.display)

    def plan_runs(self, executor: Executor) -> list[QueuedRun]:
        """Return the runs of all combinations; in a sweep, an impossible one becomes a row at once.

        Raises UserError for an impossible single run.
        """
        runs = []
        self.display.total = sum(len(expand_repeats(values)) for values in self.combinations.requested)
        for combination in self.combinations.requested:
            for repeat_index, values in enumerate(expand_repeats(combination)):
                try:
                    runs.append(executor.plan_run(values, repeat_index))
                except UserError as error:
                    if not self.combinations.is_sweep:
                        raise
                    self.display.reject(values, str(error))
        return runs

    def finish(self) -> int:
        """Print the table of this command's runs, write the comparison's files, and return the exit status."""
        records, client = self.display.records, self.display.tracking_client
        comparison, is_sweep = self.combinations.comparison, self.combinations.is_sweep
        if self.planned_order is not None:
            self.planned_order.validate(comparison, records, self.display.print_line)
        if records:
            shown = view_of((comparison.path, read_runs(comparison.path)))
            try:  # the files come first, as the terminal may be closed, and the table also where the disk is full
                if is_sweep:
                    from harness.report.files import write_files  # its figures take seconds to draw
                    from harness.report.sections import sections

                    paths = write_files(comparison.path, shown, sections(shown))
                else:
                    paths = [write_runs_csv(comparison.path, rows_of(shown.records))]
            finally:
                print_table(shown, terminal(), [record.run_id for record in records])
                if is_sweep:
                    print_answers(shown, terminal())
            print(*paths, sep="\n")
            if is_sweep or len(records) > 1:
                client.hand_over("log_table", records[-1].config["tracking"], comparison.path)
        client.close()
        print(*self.job_commands, sep="\n", end="\n" * bool(self.job_commands))
        statuses, reasons = ({record.row.get(column) for record in records} for column in ("status", "reason"))
        if self.is_disk_full or (statuses == {"refused"} and len(reasons) == 1):  # nothing ran
            return 1
        return 0 if statuses <= (SWEEP_STATUSES if is_sweep else {"ok"}) else 1


def main(combinations: Combinations) -> int:
    """Run all combinations.

    Return 0 if every run is ok, or in a sweep also out of memory or refused; 1 if there is any other row, all are
    refused for one reason, or the disk is too full for the runs that are left; 130 if it was interrupted. Raises
    UserError for a mistake in the command.
    """
    command = RunCommand(combinations)
    with restored_handlers():
        set_handlers()
        try:
            command.execute()
            return command.finish()
        except KeyboardInterrupt:
            ignore_all_but_sigint()
            command.finish()
            if not command.display.records:
                print("harness: interrupted before a run was recorded", file=sys.stderr)
            return 130
        finally:
            for cache in Path(tempfile.gettempdir()).glob("torchinductor_*"):  # empty where torch has compiled nothing
                with suppress(OSError):
                    cache.rmdir()
