"""The interface of executors, what those on one machine share, and the one that makes one run after another."""

from collections.abc import Sequence
from typing import Protocol

from harness.config.from_dict import ConfigValues
from harness.config.model import ModelConfig
from harness.config.schema import ClusterConfig
from harness.hardware.machine import Machine
from harness.launcher.forkserver import start_forkserver
from harness.launcher.multinode import NodeGroup
from harness.records.schema import Record
from harness.runner.launch_run import RunContext
from harness.runner.local_machine import detect_machine
from harness.runner.reuse import reusable_record
from harness.runner.run import execute
from harness.sweep.display import ProgressDisplay
from harness.sweep.queued_run import QueuedRun, plan_run
from harness.util.errors import UserError


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

    def poll(self) -> list[tuple[QueuedRun, Record | None]]:
        """Return the runs that ended, after a short wait if none has, with their records.

        A run without a record is being made by another command.
        """

    def interrupt(self) -> list[tuple[QueuedRun, Record]]:
        """End the runs in progress and return their records."""

    def close(self) -> None:
        """Release what the executor has."""


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
        """Return the planned run of composed values."""
        return plan_run(values, repeat_index, self.machine)

    def stored_record(self, run: QueuedRun) -> Record | None:
        """Return the run's stored record if it can be reused."""
        return reusable_record(run.config, run.command, run.planned.folder, self.display.print_line)


class SequentialExecutor(LocalExecutor):
    """The executor of one run after another in this process; in a cluster's job, over the nodes that it leads."""

    max_parallel = 1

    def __init__(self, models: Sequence[ModelConfig], display: ProgressDisplay, nodes: NodeGroup | None = None) -> None:
        super().__init__(models, display)
        self.nodes = nodes
        self.done: list[tuple[QueuedRun, Record | None]] = []

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
            on_progress=lambda folder: self.display.update(run, folder),
            log=self.display.print_line,
            nodes=self.nodes,
        )
        self.done.append((run, execute(run.planned, context)))

    def poll(self) -> list[tuple[QueuedRun, Record | None]]:
        """Return the run that was made. Raises KeyboardInterrupt if a signal to this process interrupted it."""
        ((run, record),) = self.done
        if record is not None and record.status == "interrupted":
            raise KeyboardInterrupt
        self.done = []
        return [(run, record)]

    def interrupt(self) -> list[tuple[QueuedRun, Record]]:
        """Return the run that was interrupted, if one was."""
        return [(run, record) for run, record in self.done if record is not None]

    def close(self) -> None:
        """Do nothing: this executor has nothing to release."""
