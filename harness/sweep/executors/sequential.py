"""Runs one after another in this process; and what that has in common with other ways on this machine."""

from collections.abc import Sequence
from typing import Any

from harness.config.schema import ClusterConfig, ModelConfig
from harness.hardware.machine import Machine
from harness.launcher.launch import start_forkserver
from harness.launcher.multinode import NodeGroup
from harness.records.schema import Record
from harness.runner.context import RunContext
from harness.runner.local_machine import detect_machine
from harness.runner.run import execute
from harness.sweep.display import ProgressDisplay
from harness.sweep.executors.base import local_machine, stored_record
from harness.sweep.queued_run import QueuedRun, plan_item


class SequentialExecutor:
    """One run after another, in this process; in a cluster's job, over the nodes that it leads."""

    max_parallel = 1

    def __init__(self, models: Sequence[ModelConfig], display: ProgressDisplay, nodes: NodeGroup | None = None) -> None:
        self.models, self.display, self.team = models, display, nodes
        self.done: list[tuple[QueuedRun, Record | None]] = []

    def plan_item(self, values: dict[str, Any], turn: int) -> QueuedRun:
        return plan_item(values, turn, self.machine)

    def machine(self, cluster: ClusterConfig) -> Machine:
        found = detect_machine(cluster) if self.team else local_machine(cluster)
        start_forkserver(found.device)  # its imports go on while the runs are planned
        return found

    def stored_record(self, item: QueuedRun) -> Record | None:
        return stored_record(item, self.display.print_line)

    def can_start(self, item: QueuedRun) -> bool:
        return not self.done

    def start(self, item: QueuedRun) -> None:
        assert item.plan is not None
        means = RunContext(
            models=self.models,
            on_progress=lambda at: self.display.tick(item, at),
            log=self.display.print_line,
            nodes=self.team,
        )
        self.done.append((item, execute(item.plan, means)))

    def poll(self) -> list[tuple[QueuedRun, Record | None]]:
        ((item, record),) = self.done
        if record is not None and record["row"]["status"] == "interrupted":  # by a signal to this process
            raise KeyboardInterrupt
        self.done = []
        return [(item, record)]

    def interrupt(self) -> list[tuple[QueuedRun, Record]]:
        return [(item, record) for item, record in self.done if record is not None]

    def close(self) -> None:
        pass
