"""The interfaces of executors and of a sweep's observers, and what executors on one machine share."""

from typing import Protocol

from harness.config.schema import ClusterConfig
from harness.config.values import ConfigValues
from harness.hardware.machine import Machine
from harness.records.schema import Record
from harness.runner.context import LogFn
from harness.runner.local_machine import detect_machine
from harness.runner.reuse import reusable_record
from harness.sweep.queued_run import QueuedRun
from harness.util.errors import UserError


def local_machine(cluster: ClusterConfig) -> Machine:
    """Return this machine. Raises UserError if the cluster is more than one machine."""
    if cluster.nodes > 1:
        raise UserError(f"cluster.nodes={cluster.nodes} is more than this machine: choose 1, or hydra/launcher=slurm")
    return detect_machine(cluster)


def stored_record(run: QueuedRun, log: LogFn) -> Record | None:
    """Return the stored record of a planned run if it can be reused."""
    assert run.plan is not None
    return reusable_record(run.config, run.command, run.plan.folder, log)


class Executor(Protocol):
    """The part of a command that makes runs: in this process, side by side in others, or as jobs of a cluster."""

    @property
    def max_parallel(self) -> int:
        """The number of runs that it can make at the same time."""
        ...

    def plan_run(self, values: ConfigValues, repeat_index: int) -> QueuedRun:
        """Return the run of composed values, planned if its machine is known. Raises UserError if it is impossible."""
        ...

    def stored_record(self, run: QueuedRun) -> Record | None:
        """Return the run's stored record if it can be reused."""
        ...

    def can_start(self, run: QueuedRun) -> bool:
        """Return whether the run can be started now, beside those that run."""
        ...

    def start(self, run: QueuedRun) -> None:
        """Start the run."""
        ...

    def poll(self) -> list[tuple[QueuedRun, Record | None]]:
        """Return the runs that ended, after a short wait if none has, with their records.

        A run without a record is being made by another command.
        """
        ...

    def interrupt(self) -> list[tuple[QueuedRun, Record]]:
        """End the runs in progress and return their records."""
        ...

    def close(self) -> None:
        """Release what the executor has."""
        ...


class SweepObserver(Protocol):
    """The part of a command that follows the progress of its sweep."""

    def on_started(self, run: QueuedRun) -> None:
        """Handle the start of a run."""
        ...

    def on_record(self, run: QueuedRun, record: Record, is_new: bool) -> None:
        """Handle the record of a run, new or stored before."""
        ...

    def log(self, line: str) -> None:
        """Handle a line for the user."""
        ...
