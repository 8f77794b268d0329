"""TODO harness.sweep.executors.base."""

from typing import Any, Protocol

from harness.config.schema import ClusterConfig
from harness.hardware.machine import Machine
from harness.records.schema import Record
from harness.runner.local_machine import detect_machine
from harness.runner.reuse import LogFn, reusable_record
from harness.sweep.queued_run import QueuedRun
from harness.util.errors import UserError


def local_machine(cluster: ClusterConfig) -> Machine:
    if cluster.nodes > 1:
        raise UserError(
            f"cluster.nodes={cluster.nodes} is more than this machine: choose 1, or hydra/launcher=submitit_slurm"
        )
    return detect_machine(cluster)


def stored_record(item: QueuedRun, say: LogFn) -> Record | None:
    """The record on file of a planned run."""
    assert item.plan is not None
    return reusable_record(item.config, item.plan.directory, say)


class Executor(Protocol):
    """Where runs are made: in this process, side by side in others, as jobs of a cluster."""

    @property
    def max_parallel(self) -> int:
        """How many runs there can be at once."""
        ...

    def plan_item(self, values: dict[str, Any], turn: int) -> QueuedRun:
        """The run of these values, planned if its machine is known. Raises UserError if it is impossible."""
        ...

    def stored_record(self, item: QueuedRun) -> Record | None:
        """Its record, if that stands."""
        ...

    def can_start(self, item: QueuedRun) -> bool:
        """Whether it can be begun now, beside what runs."""
        ...

    def start(self, item: QueuedRun) -> None: ...

    def poll(self) -> list[tuple[QueuedRun, Record | None]]:
        """What ended, after waiting a moment if nothing did; None: another command is at it."""
        ...

    def interrupt(self) -> list[tuple[QueuedRun, Record]]:
        """Ends what it runs; the records of that."""
        ...

    def close(self) -> None: ...


class SweepObserver(Protocol):
    """Who is told how far the sweep is."""

    def on_started(self, item: QueuedRun) -> None: ...

    def on_record(self, item: QueuedRun, record: Record, is_new: bool) -> None: ...

    def log(self, line: str) -> None: ...
