"""A sweep in the order of its predictions: the best first, the others left out, and whether the winner won."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

    def validation(self, records: Sequence[Record]) -> PlanValidation:
        """Return what the records say of the predictions."""
        speeds = {record.run_id: float(record.row["tokens_per_second"]) for record in records if record.status == "ok"}
        configurations = []
        for entry in self.configurations:
            measured = [speeds[run.name] for run in entry.runs if run.name in speeds]
            speed = statistics.median(measured) if measured else None
            configurations.append(PlannedConfiguration(entry.runs[0].name, entry.tokens_per_second, speed))
        return PlanValidation(tuple(configurations), self.combinations)

    def validate(self, comparison: ComparisonFolder, records: Sequence[Record], log: Callable[[str], None]) -> None:
        """Write and print whether the predicted winner won, if the sweep is to say it."""
        if self.validates and self.configurations:
            validation = self.validation(records)
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
    ranked, not_fitting, not_predicted = [], 0, 0
    for repeats in configurations.values():
        plan = _plan_of(repeats[0], setting)
        if plan.prediction is None:
            not_predicted += 1
        elif not may_fit(plan, plan.prediction):
            not_fitting += 1
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
    if not_fitting:
        reasons.append(f"{not_fitting} predicted not to fit")
    if not_predicted:
        reasons.append(f"{not_predicted} without a prediction of time")
    left_out = f"{len(configurations) - len(chosen)} of {count_text(len(configurations), 'configuration')}"
    note = f"{setting}: {left_out} are not run: {'; '.join(reasons)}" if reasons else ""
    return PlannedOrder(chosen, note, len(configurations), settings.validate)


def _plan_of(run: QueuedRun, setting: str) -> RunPlan:
    """Return the plan of a run. Raises UserError where its machine is unknown, or described by no file."""
    if run.plan is None:
        raise UserError(f"{setting} needs to know the machine of the runs, which only Slurm's jobs do: leave it out")
    if run_hardware(run.plan.machine, run.plan.config.cluster, run.plan.nodes) is None:
        name = run.plan.machine.device_name
        raise UserError(
            f"{setting} needs predictions, and no file in conf/cluster describes this machine ({name}): run harness"
            " calibrate first"
        )
    return run.plan


def may_fit(plan: RunPlan, prediction: Prediction) -> bool:
    """Return whether a run may fit this machine's free memory, by the errors of predictions on file."""
    free = dataclasses.replace(prediction.cluster.hardware, memory=plan.machine.available_bytes(plan.devices))
    cluster = dataclasses.replace(prediction.cluster, hardware=free)
    return dataclasses.replace(prediction, cluster=cluster).verdict.fits != "no"
