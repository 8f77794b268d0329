"""The executor that makes one run after another in this process, and what it shares with that of parallel runs."""

from collections.abc import Sequence
from functools import partial

from harness.config.command import read_command_config
from harness.config.from_dict import ConfigValues
from harness.config.model import ModelConfig
from harness.config.schema import ClusterConfig
from harness.hardware.machine import Machine
from harness.launcher.forkserver import start_forkserver
from harness.launcher.multinode import NodeGroup
from harness.records.schema import Record
from harness.runner.launch_run import RunContext
from harness.runner.local_machine import detect_machine
from harness.runner.plan import RunPlan, fits_now, make_plan
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.runner.reuse import reusable_record
from harness.runner.run import execute
from harness.runner.simulation import machine_of_run
from harness.sweep.display import ProgressDisplay
from harness.sweep.queued_run import (
    Ended,
    MicroBatchSearch,
    QueuedRun,
    feasible_plans,
    queue_plan,
    wants_max_micro_batch,
)
from harness.util.errors import UserError


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
        machine = machine_of_run(values, self.machine)
        values = resolve_auto(values, machine.device, machine.compute_capability)

        def plan(candidate: ConfigValues) -> RunPlan:
            return make_plan(resolve_run_config(candidate), machine, read_command_config(candidate))

        if not wants_max_micro_batch(values):
            return queue_plan(plan(values), repeat_index)
        search = MicroBatchSearch(feasible_plans(values, plan), fits_now)
        return queue_plan(search.first, repeat_index, search)

    def stored_record(self, run: QueuedRun) -> Record | None:
        """Return the run's stored record if it can be reused."""
        return reusable_record(run.config, run.command, run.planned.folder, self.display.print_line)


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
