"""The loop of one command: its runs started in order by an executor until every one has its record.

Here is the executor that makes one run after another in this process, and what it shares with that of parallel runs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from harness.config.command import read_command_config
from harness.config.from_dict import ConfigValues
from harness.config.model import ModelConfig
from harness.config.schema import ClusterConfig
from harness.hardware.machine import Machine
from harness.launcher.forkserver import start_forkserver
from harness.launcher.multinode import NodeGroup
from harness.records.schema import Record
from harness.runner.launch_run import RunContext
from harness.runner.plan import RunPlan, fits_now, make_plan
from harness.runner.record import forget_rejections
from harness.runner.resolve import detect_machine, machine_of_run, resolve_auto, resolve_run_config
from harness.runner.reuse import reusable_record
from harness.runner.run import execute
from harness.sweep.display import ProgressDisplay
from harness.sweep.queued_run import (
    Ended,
    MicroBatchSearch,
    QueuedRun,
    StopAfter,
    feasible_plans,
    queue_plan,
    wants_max_micro_batch,
)
from harness.util.files import has_free_space
from harness.util.text import UserError, count_text

RETRY_SECONDS = 0.5  # before a run that another command works on is tried again

FAILURES = ("error", "timeout")  # the statuses of failed runs


class Executor(Protocol):
    """The part of a command that makes runs: in this process, side by side in others, or as jobs of a cluster."""

    display: ProgressDisplay

    @property
    def max_parallel(self) -> int:
        """The number of runs that it can make at the same time."""

    def plan_run(self, values: ConfigValues, repeat_index: int) -> QueuedRun:
        """Return the run of composed values, planned if its machine is known. Raises UserError if it is impossible."""

    def stored_record(self, run: QueuedRun) -> Record | None:
        """Return the run's stored record if it can be reused."""

    def can_start(self, run: QueuedRun) -> bool:
        """Return whether the run can be started now, beside those that run."""

    def start(self, run: QueuedRun) -> None:
        """Start the run."""

    def poll(self) -> Ended:
        """Return the runs that ended, after a short wait if none has, with their records."""

    def interrupt(self) -> Ended:
        """End the runs in progress and return them with their records."""

    def close(self) -> None:
        """Release what the executor has."""


@dataclass
class Scheduler:
    """The runs of one command, and the executor that makes them."""

    executor: Executor
    stop_after: StopAfter
    waiting: list[QueuedRun]
    running: list[QueuedRun] = field(default_factory=list)
    retries: bool = True  # whether it runs again what ended from outside; a cluster's job leaves that to its command
    is_disk_full: bool = False  # so that runs are left

    def run(self) -> bool:
        """Work until every run has its record, a limit is reached, or the disk is full; return whether it was the disk.

        Raises KeyboardInterrupt.
        """
        for run in list(self.waiting):
            if self.is_done(run):
                self.waiting.remove(run)
        try:
            while self.waiting or self.running:
                self.start_ready()
                if self.running:
                    for run, record in self.executor.poll():
                        self.finish(run, record)
                elif self.waiting:
                    time.sleep(max(0.0, min(run.not_before for run in self.waiting) - time.monotonic()))
        except KeyboardInterrupt:
            for run, record in self.executor.interrupt():
                if record is not None:
                    self.executor.display.run_ended(run, record)
            raise
        finally:
            self.executor.close()
        return self.is_disk_full

    def is_done(self, run: QueuedRun) -> bool:
        """Return whether the run has a reusable record, and show that record."""
        record = self.executor.stored_record(run)
        if record is not None:
            self.record_run(run, record)
        return record is not None

    def start_ready(self) -> None:
        """Start every waiting run that can be started now, in order; drop all of them at a limit."""
        now = time.monotonic()
        for run in list(self.waiting):
            if run.not_before > now or not self.executor.can_start(run):
                continue
            reason = self.stop_after.exceeded_limit()
            if not reason and not has_free_space(run.comparison.path):
                self.is_disk_full = True
                reason = f"no disk space is left in {run.comparison.path}"
            if reason:
                remaining = count_text(len(self.waiting), "run")
                self.executor.display.print_line(f"{reason} with {remaining} left: the same command continues")
                self.waiting.clear()
                return
            self.waiting.remove(run)
            self.running.append(run)
            self.stop_after.started += 1
            if run not in self.executor.display.running:  # and not made by another command or ended from outside
                self.executor.display.run_started(run)
            self.executor.start(run)

    def finish(self, run: QueuedRun, record: Record | None) -> None:
        """Show a run's record.

        Queue it again if it ended from outside, or has no record because another command is working on it.
        """
        self.running.remove(run)
        pause = RETRY_SECONDS
        if record is not None:
            is_outside = self.retries and record.row.get("ended_from_outside")
            if not is_outside or run.retried >= run.command.retries:
                self.stop_after.failed += record.status in FAILURES
                self.record_run(run, record)
                return
            run.retried, pause = run.retried + 1, run.command.retry_pause_seconds
            self.executor.display.run_retried(run, record, pause)
        elif not run.locked_elsewhere:
            self.executor.display.print_line(f"{run.name} is being run by another command: it is tried again later")
            run.locked_elsewhere = True
        run.not_before = time.monotonic() + pause
        self.stop_after.started -= 1
        self.waiting.append(run)

    def record_run(self, run: QueuedRun, record: Record) -> None:
        """Show a run's record, and put the next run of its search before all others, or log the search's result."""
        self.executor.display.run_ended(run, record)
        if run.search is None:
            return
        plan = run.search.next(record)
        if plan is None:
            self.executor.display.print_line(run.search.result())
            return
        following = queue_plan(plan, run.repeat_index, run.search)
        if not self.is_done(following):
            self.waiting.insert(0, following)


class LocalExecutor:
    """The part of an executor that plans runs for this machine and reuses the records in their folders."""

    def __init__(self, models: Sequence[ModelConfig], display: ProgressDisplay) -> None:
        self.models, self.display = models, display

    def machine(self, cluster: ClusterConfig) -> Machine:
        """Return this machine. Raises UserError if the cluster is more than one machine."""
        if cluster.nodes > 1:
            raise UserError(
                f"cluster.nodes={cluster.nodes} is more than this machine: choose 1, or hydra/launcher=slurm"
            )
        return detect_machine(cluster)

    def plan_run(self, values: ConfigValues, repeat_index: int) -> QueuedRun:
        """Return the run of composed values, or the first run of the search that they request. Raises UserError."""
        machine, composed = machine_of_run(values, self.machine), values
        values = resolve_auto(values, machine.device, machine.compute_capability)

        def plan(candidate: ConfigValues) -> RunPlan:
            return make_plan(resolve_run_config(candidate), machine, read_command_config(candidate))

        search = MicroBatchSearch(feasible_plans(values, plan), fits_now) if wants_max_micro_batch(values) else None
        run = queue_plan(search.first if search else plan(values), repeat_index, search)
        forget_rejections(composed, run.planned)
        return run

    def stored_record(self, run: QueuedRun) -> Record | None:
        """Return the run's stored record if it can be reused."""
        return reusable_record(run.command, run.planned.folder, self.display.print_line)


class SequentialExecutor(LocalExecutor):
    """The executor of one run after another in this process; in a cluster's job, over the nodes that it leads."""

    max_parallel = 1

    def __init__(self, models: Sequence[ModelConfig], display: ProgressDisplay, nodes: NodeGroup | None = None) -> None:
        super().__init__(models, display)
        self.nodes = nodes
        self.done: Ended = []

    def machine(self, cluster: ClusterConfig) -> Machine:
        """Return the machine to run on; ranks import torch in the background while runs are planned."""
        machine = detect_machine(cluster) if self.nodes else super().machine(cluster)
        start_forkserver(machine.device)
        return machine

    def can_start(self, run: QueuedRun) -> bool:
        """Return whether the last run's record was collected."""
        return not self.done

    def start(self, run: QueuedRun) -> None:
        """Make the run and return when it has ended."""
        context = RunContext(
            models=self.models,
            on_progress=partial(self.display.update, run),
            log=self.display.print_line,
            nodes=self.nodes,
        )
        self.done.append((run, execute(run.planned, context)))

    def poll(self) -> Ended:
        """Return the run that was made. Raises KeyboardInterrupt if a signal to this process interrupted it."""
        ((run, record),) = self.done
        if record is not None and record.status == "interrupted":
            raise KeyboardInterrupt
        self.done = []
        return [(run, record)]

    def interrupt(self) -> Ended:
        """Return the run that was interrupted, if one was."""
        return self.done

    def close(self) -> None:
        """Do nothing: this executor has nothing to release."""
