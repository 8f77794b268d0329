"""The runs that a command is to make, each planned as far as its machine is known.

Behind train.micro_batch=max is a search for the largest micro-batch that fits, which runs one candidate after another.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.command import CommandConfig
from harness.config.from_dict import ConfigValues
from harness.config.schema import RunConfig
from harness.cost_model.flops import model_flops
from harness.records.run_folder import ComparisonFolder, comparison_folder
from harness.records.schema import Record
from harness.runner.plan import RunPlan
from harness.util.errors import UserError


@dataclass(eq=False)
class QueuedRun:
    """A run to be made."""

    config: RunConfig
    command: CommandConfig
    plan: RunPlan | None  # None where only a node of a cluster knows the machine
    name: str  # the run id, or what replaces it without a plan
    repeat_index: int = 0  # the first repeats of all configurations come before the second ones
    search: "MicroBatchSearch | None" = None  # decides from this run's record what is tried next
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


Ended = list[tuple[QueuedRun, Record | None]]  # runs that ended; one without a record is made by another command


def deduplicate_and_sort(runs: Iterable[QueuedRun]) -> list[QueuedRun]:
    """Return each run once, cheap ones first, because their results may rule out others; ties keep their order."""
    unique: dict[tuple[Path, str], QueuedRun] = {}
    for run in runs:
        unique.setdefault((run.comparison.path, run.name), run)
    return sorted(unique.values(), key=lambda run: (run.repeat_index, run.cost))


def queue_plan(plan: RunPlan, repeat_index: int = 0, search: "MicroBatchSearch | None" = None) -> QueuedRun:
    """Return the run of a plan."""
    return QueuedRun(plan.config, plan.command, plan, plan.run_id, repeat_index, search)


def wants_max_micro_batch(values: ConfigValues) -> bool:
    """Return whether composed values have train.micro_batch=max."""
    train = values.get("train")
    return isinstance(train, dict) and train.get("micro_batch") == "max"


def candidates(values: ConfigValues) -> list[ConfigValues]:
    """Return the values with every micro-batch that divides the global batch, smallest first. Raises UserError."""
    batch = values["train"].get("global_batch")
    if type(batch) is not int or batch < 1:
        raise UserError(
            f"train.micro_batch=max searches the divisors of train.global_batch={batch}: choose a whole number for it"
        )
    sizes = (size for size in range(1, batch + 1) if batch % size == 0)
    return [values | {"train": values["train"] | {"micro_batch": size}} for size in sizes]


def feasible_plans(values: ConfigValues, plan: Callable[[ConfigValues], RunPlan]) -> list[RunPlan]:
    """Return the plans of the candidates that can be run. Raises the UserError of the smallest if none can."""
    plans: list[RunPlan] = []
    errors: list[UserError] = []
    for candidate in candidates(values):
        try:
            plans.append(plan(candidate))
        except UserError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return plans


class MicroBatchSearch:
    """A search that starts at the largest micro-batch predicted to fit and goes up or down, one run at a time."""

    def __init__(self, plans: Sequence[RunPlan], fits: Callable[[RunPlan], bool]) -> None:
        self.plans = plans
        self.index = max((index for index, plan in enumerate(plans) if fits(plan)), default=0)
        self.statuses: dict[int, str] = {}  # of the plans that were run, by their indices

    @property
    def first(self) -> RunPlan:
        """The plan to run first."""
        return self.plans[self.index]

    def next(self, record: Record) -> RunPlan | None:
        """Return the plan to run after this record; None if the search is over, or any other failure ends it."""
        self.statuses[self.index] = record.status
        following = self.index + (1 if record.status == "ok" else -1)
        is_open = following not in self.statuses and 0 <= following < len(self.plans)
        if record.status not in ("ok", "oom", "refused") or not is_open:
            return None
        self.index = following
        return self.plans[following]

    def result(self) -> str:
        """Return the outcome of the search as one line."""
        sizes = [plan.config.train.micro_batch for plan in self.plans]
        fitting = [index for index, status in self.statuses.items() if status == "ok"]
        failed = min(self.statuses.keys() - fitting, default=None)
        largest = f"{sizes[max(fitting)]} fits" if fitting else "no micro-batch is ok"
        above = "" if failed is None else f"; {sizes[failed]} is {self.statuses[failed]}"
        return f"train.micro_batch=max of {self.plans[0].run_id.rpartition('-')[0]}: {largest}{above}"
