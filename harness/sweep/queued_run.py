"""The runs that a command is to make, each planned as far as its machine is known, and their order.

Behind train.micro_batch=max is a search for the largest micro-batch that fits, which runs one candidate after another.
A sweep may be made in the order of its predictions: the best first, the others left out. A command may have limits,
after which it starts no further run: stop_after=8h,20runs,3failures.
"""

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from harness.config.command import CommandConfig, PlanConfig
from harness.config.fingerprint import short_hash
from harness.config.from_dict import ConfigValues
from harness.config.schema import RunConfig
from harness.cost_model.flops import model_flops
from harness.cost_model.prediction import Prediction
from harness.hardware.machine import run_hardware
from harness.records.plan_validation import PlannedConfiguration, PlanValidation, write_plan_validation
from harness.records.run_folder import ComparisonFolder, comparison_folder
from harness.records.schema import Record
from harness.runner.plan import RunPlan
from harness.util.text import UserError, count_text

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # of a limit in seconds


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
    retried: int = 0  # how often this command has run it again
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


@dataclass(frozen=True)
class PlannedOrder:
    """The configurations that a sweep measures, the best prediction first, and a sentence on the others."""

    configurations: Sequence[tuple[float, Sequence[QueuedRun]]]  # predicted tokens per second, and the repeats
    note: str  # on those that are not run, '' if all are
    combinations: int  # of the whole sweep
    validates: bool

    @property
    def runs(self) -> list[QueuedRun]:
        """The runs in their order: first repeats before second ones, as in any sweep."""
        runs = [run for _, repeats in self.configurations for run in repeats]
        return sorted(runs, key=lambda run: run.repeat_index)

    def validate(self, comparison: ComparisonFolder, records: Sequence[Record], log: Callable[[str], None]) -> None:
        """Write and print whether the predicted winner won, if the sweep is to say it."""
        if not self.validates or not self.configurations:
            return
        speeds = {record.run_id: float(record.row["tokens_per_second"]) for record in records if record.status == "ok"}
        configurations = []
        for predicted, repeats in self.configurations:
            measured = [speeds[run.name] for run in repeats if run.name in speeds]
            median = statistics.median(measured) if measured else None
            configurations.append(PlannedConfiguration(repeats[0].name, predicted, median))
        validation = PlanValidation(tuple(configurations), self.combinations)
        write_plan_validation(comparison, validation)
        log(validation.sentence())


def order_by_plan(runs: Sequence[QueuedRun], settings: PlanConfig) -> PlannedOrder:
    """Return a sweep's runs in the order of their predicted tokens per second, the best plan.top of them.

    A layout that does not fit by the errors on file, or that has no prediction, is left out. Raises UserError if this
    machine is not described, so that nothing can be predicted.
    """
    setting = "plan.validate=true" if settings.top is None else f"plan.top={settings.top}"
    configurations: dict[str, list[QueuedRun]] = {}
    for run in runs:
        same = run.config.to_dict() | {"repeat": 0, "folder": str(run.comparison.path)}  # for all repeats
        configurations.setdefault(short_hash(same), []).append(run)
    ranked: list[tuple[float, list[QueuedRun]]] = []
    unfit: Counter[str] = Counter()
    for repeats in configurations.values():
        plan = _plan_of(repeats[0], setting)
        if plan.prediction is None:
            unfit["without a prediction of time"] += 1
        elif not may_fit(plan, plan.prediction):
            unfit["predicted not to fit"] += 1
        else:
            ranked.append((plan.prediction.tokens_per_second, repeats))
    ranked.sort(key=itemgetter(0), reverse=True)
    chosen = ranked[: settings.top]
    slower = ranked[len(chosen) :]
    reasons = [f"{number} {reason}" for reason, number in sorted(unfit.items())]
    if slower:
        slowdown = chosen[-1][0] / slower[0][0] - 1
        last = "the best" if len(chosen) == 1 else f"the best {len(chosen)}"
        reasons.insert(0, f"{len(slower)} predicted to be slower than {last}, by {slowdown:.1%} or more")
    left_out = f"{len(configurations) - len(chosen)} of {count_text(len(configurations), 'configuration')}"
    note = f"{setting}: {left_out} are not run: {'; '.join(reasons)}" if reasons else ""
    return PlannedOrder(chosen, note, len(configurations), settings.validate)


def _plan_of(run: QueuedRun, setting: str) -> RunPlan:
    """Return the plan of a run. Raises UserError where its machine is unknown, or described by no file."""
    if run.plan is None:
        raise UserError(f"{setting} cannot predict jobs of a cluster, whose machine is unknown here: leave it out")
    if run_hardware(run.plan.machine, run.plan.config.cluster, run.plan.nodes) is None:
        raise UserError(
            f"{setting} needs a description of this machine ({run.plan.machine.device_name}): type harness calibrate"
            " first"
        )
    return run.plan


def may_fit(plan: RunPlan, prediction: Prediction) -> bool:
    """Return whether a run may fit this machine's free memory, by the errors of predictions on file."""
    free = replace(prediction.cluster.hardware, memory=plan.machine.available_bytes(plan.devices))
    cluster = replace(prediction.cluster, hardware=free)
    return replace(prediction, cluster=cluster).verdict.fits != "no"


@dataclass
class StopAfter:
    """The limits of a command, by their units, and how much of them is used up."""

    limits: dict[str, float] = field(default_factory=dict)  # of "s", "runs" and "failures"
    started_at: float = field(default_factory=time.monotonic)
    started: int = 0  # runs
    failed: int = 0  # runs

    def exceeded_limit(self) -> str:
        """Return a phrase such as "stop_after=20runs is reached" if a limit is reached; '' while none is."""
        used = {"s": time.monotonic() - self.started_at, "runs": self.started, "failures": self.failed}
        reached = (unit for unit, number in used.items() if number >= self.limits.get(unit, math.inf))
        return next((f"stop_after={self.limits[unit]:.15g}{unit} is reached" for unit in reached), "")


def parse_stop_after(entries: Sequence[str | int | float]) -> StopAfter:
    """Return the limits of stop_after's entries: seconds, or a number with s, m, h, d, runs or failures.

    Raises UserError for any other entry.
    """
    limits: dict[str, float] = {}
    for entry in entries:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)|(\d+)\s*(runs|failures)", str(entry))
        if match is None:
            raise UserError(f"stop_after={entry} is not a limit: choose a time such as 90m or 8h, 20runs, or 3failures")
        seconds, unit, number, counted = match.groups()
        limits[counted or "s"] = float(number) if counted else float(seconds) * UNITS[unit]
    return StopAfter(limits)
