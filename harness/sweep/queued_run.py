"""The runs that a command asks for, each planned as far as the machine it is for is known."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.schema import ClusterConfig, RunConfig
from harness.cost_model.flops import model_flops
from harness.hardware.machine import Machine
from harness.records.run_folder import comparison_folder
from harness.runner.plan import Plan, fits, make_plan
from harness.runner.resolve import resolve_run_config
from harness.sweep.micro_batch_search import MicroBatchSearch, feasible_plans, wants_max_micro_batch


@dataclass(eq=False)
class QueuedRun:
    """A run to be made. plan is None where only the place that makes it knows the machine."""

    config: RunConfig
    plan: Plan | None
    name: str  # what it is called while it has no record
    repeat_index: int = 0  # repeats come in turns, so that they are not of one moment
    search: MicroBatchSearch | None = None  # what follows from its record
    not_before: float = 0.0  # time.monotonic()
    locked_elsewhere: bool = False  # another command was at it

    @property
    def folder(self) -> Path:
        return comparison_folder(self.config.to_dict())

    @property
    def cost(self) -> float:
        """Operations of the whole run, the same however they are divided: only good to compare."""
        return float(model_flops(self.config) * self.config.train.total_steps)


def deduplicate_and_sort(items: Iterable[QueuedRun]) -> list[QueuedRun]:
    """Each run once; the cheap first, whose end tells most of the others, and of equals as asked for."""
    unique: dict[tuple[Path, str], QueuedRun] = {}
    for item in items:
        unique.setdefault((item.folder, item.name), item)
    return sorted(unique.values(), key=lambda item: (item.repeat_index, item.cost))


def plan_item(values: dict[str, Any], turn: int, machine_of: Callable[[ClusterConfig], Machine]) -> QueuedRun:
    """The run of these values, or the first of those that a search makes of them. Raises UserError."""

    def plan(one: dict[str, Any]) -> Plan:
        config = resolve_run_config(one)
        return make_plan(config, machine_of(config.cluster))

    if wants_max_micro_batch(values):
        search = MicroBatchSearch(feasible_plans(values, plan), fits)
        return QueuedRun(search.first.config, search.first, search.first.run_id, turn, search)
    found = plan(values)
    return QueuedRun(found.config, found, found.run_id, turn)
