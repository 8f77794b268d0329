"""A sweep in the order of its predictions: the best first, the others left out, and whether the winner won."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.config.command import PlanConfig
from harness.config.fingerprint import short_hash
from harness.cost_model.prediction import Prediction
from harness.hardware.described_cluster import run_hardware
from harness.records.plan_validation import PlannedConfiguration, PlanValidation, write_plan_validation
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.runner.plan import RunPlan
from harness.sweep.queued_run import QueuedRun
from harness.util.errors import UserError
from harness.util.text import count_text


@dataclass(frozen=True)
class RankedConfiguration:
    """A configuration of a sweep with its repeats, and its predicted speed."""

    runs: Sequence[QueuedRun]
    tokens_per_second: float


@dataclass(frozen=True)
class PlannedOrder:
    """The configurations that a sweep measures, the best prediction first, and a sentence on the others."""

    configurations: Sequence[RankedConfiguration]
    note: str  # on those that are not run, '' if all are
    combinations: int  # of the whole sweep
    validates: bool

    @property
    def runs(self) -> list[QueuedRun]:
        """The runs in their order: first repeats before second ones, as in any sweep."""
        runs = [run for configuration in self.configurations for run in configuration.runs]
        return sorted(runs, key=lambda run: run.repeat_index)

    def validate(self, comparison: ComparisonFolder, records: Sequence[Record], log: Callable[[str], None]) -> None:
        """Write and print whether the predicted winner won, if the sweep is to say it."""
        if not self.validates or not self.configurations:
            return
        speeds = {record.run_id: float(record.row["tokens_per_second"]) for record in records if record.status == "ok"}
        measured = ([speeds[run.name] for run in entry.runs if run.name in speeds] for entry in self.configurations)
        configurations = tuple(
            PlannedConfiguration(
                entry.runs[0].name, entry.tokens_per_second, statistics.median(speed) if speed else None
            )
            for entry, speed in zip(self.configurations, measured, strict=True)
        )
        validation = PlanValidation(configurations, self.combinations)
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
    ranked: list[RankedConfiguration] = []
    unfit: Counter[str] = Counter()
    for repeats in configurations.values():
        plan = _plan_of(repeats[0], setting)
        if plan.prediction is None:
            unfit["without a prediction of time"] += 1
        elif not may_fit(plan, plan.prediction):
            unfit["predicted not to fit"] += 1
        else:
            ranked.append(RankedConfiguration(repeats, plan.prediction.tokens_per_second))
    ranked.sort(key=lambda entry: -entry.tokens_per_second)
    chosen = ranked[: settings.top]
    reasons = []
    if len(ranked) > len(chosen):
        slowdown = chosen[-1].tokens_per_second / ranked[len(chosen)].tokens_per_second - 1
        last = "the best" if len(chosen) == 1 else f"the best {len(chosen)}"
        slower = len(ranked) - len(chosen)
        reasons.append(f"{slower} predicted to be slower than {last}, by {slowdown:.1%} or more")
    reasons += [f"{number} {reason}" for reason, number in sorted(unfit.items())]
    left_out = f"{len(configurations) - len(chosen)} of {count_text(len(configurations), 'configuration')}"
    note = f"{setting}: {left_out} are not run: {'; '.join(reasons)}" if reasons else ""
    return PlannedOrder(chosen, note, len(configurations), settings.validate)


def _plan_of(run: QueuedRun, setting: str) -> RunPlan:
    """Return the plan of a run. Raises UserError where its machine is unknown, or described by no file."""
    if run.plan is None:
        raise UserError(f"{setting} needs to know the machine of the runs, which only Slurm's jobs do: leave it out")
    if run_hardware(run.plan.machine, run.plan.config.cluster, run.plan.nodes) is None:
        raise UserError(
            f"{setting} needs predictions, and no file in conf/cluster describes this machine"
            f" ({run.plan.machine.device_name}): run harness calibrate first"
        )
    return run.plan


def may_fit(plan: RunPlan, prediction: Prediction) -> bool:
    """Return whether a run may fit this machine's free memory, by the errors of predictions on file."""
    free = replace(prediction.cluster.hardware, memory=plan.machine.available_bytes(plan.devices))
    cluster = replace(prediction.cluster, hardware=free)
    return replace(prediction, cluster=cluster).verdict.fits != "no"
