"""The runs that a command is to make, each planned as far as its machine is known."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.config.command import CommandConfig, read_command_config
from harness.config.from_dict import ConfigValues
from harness.config.schema import ClusterConfig, RunConfig
from harness.cost_model.flops import model_flops
from harness.hardware.machine import Machine
from harness.records.run_folder import ComparisonFolder, comparison_folder
from harness.runner.plan import RunPlan, fits_now, make_plan
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.runner.simulation import machine_of_run
from harness.sweep.micro_batch_search import MicroBatchSearch, feasible_plans, wants_max_micro_batch


@dataclass(eq=False)
class QueuedRun:
    """A run to be made."""

    config: RunConfig
    command: CommandConfig
    plan: RunPlan | None  # None where only a node of a cluster knows the machine
    name: str  # the run id, or what replaces it without a plan
    repeat_index: int = 0  # the first repeats of all configurations come before the second ones
    search: MicroBatchSearch | None = None  # decides from this run's record what is tried next
    not_before: float = 0.0  # time.monotonic()
    locked_elsewhere: bool = False  # whether another command was found working on it

    @property
    def planned(self) -> RunPlan:
        """The plan of a run whose machine is known."""
        assert self.plan is not None
        return self.plan

    @property
    def comparison(self) -> ComparisonFolder:
        """The folder of the comparison that the run belongs to."""
        return comparison_folder(self.command.name, self.command.results_dir)

    @property
    def cost(self) -> float:
        """The FLOPs of the whole run however it is distributed, which serves only to compare runs of one command."""
        return float(model_flops(self.config) * self.config.train.total_steps)


def deduplicate_and_sort(runs: Iterable[QueuedRun]) -> list[QueuedRun]:
    """Return each run once, cheap ones first, because their results may rule out others; ties keep their order."""
    unique: dict[tuple[Path, str], QueuedRun] = {}
    for run in runs:
        unique.setdefault((run.comparison.path, run.name), run)
    return sorted(unique.values(), key=lambda run: (run.repeat_index, run.cost))


def plan_run(values: ConfigValues, repeat_index: int, machine_of: Callable[[ClusterConfig], Machine]) -> QueuedRun:
    """Return the run of composed values, or the first run of the search that they request. Raises UserError."""
    machine = machine_of_run(values, machine_of)
    values = resolve_auto(values, machine.device, machine.compute_capability)
    search = None
    if wants_max_micro_batch(values):
        search = MicroBatchSearch(feasible_plans(values, lambda candidate: _plan(candidate, machine)), fits_now)
        plan = search.first
    else:
        plan = _plan(values, machine)
    return QueuedRun(plan.config, plan.command, plan, plan.run_id, repeat_index, search)


def _plan(values: ConfigValues, machine: Machine) -> RunPlan:
    return make_plan(resolve_run_config(values), machine, read_command_config(values))
