"""Whether the predicted winner of a sweep won: a file of the sweep's folder, and its sentence in a report."""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from harness.config.from_dict import from_dict
from harness.records.run_folder import ComparisonFolder
from harness.util.files import atomic_write_json, read_json_object
from harness.util.text import UserError, count_text


@dataclass(frozen=True)
class PlannedConfiguration:
    """A configuration of a sweep, its predicted speed and its measured one."""

    run_id: str  # of its first repeat
    predicted_tokens_per_second: float
    tokens_per_second: float | None  # the median of the repeats that are ok; None without one


@dataclass(frozen=True)
class PlanValidation:
    """The configurations of a sweep that were to be measured, the one with the best prediction first."""

    configurations: tuple[PlannedConfiguration, ...]
    combinations: int  # of the whole sweep, with those that were not to be measured

    @property
    def measured(self) -> Sequence[PlannedConfiguration]:
        """The configurations with a measured speed."""
        return [entry for entry in self.configurations if entry.tokens_per_second]

    @property
    def planned_best(self) -> PlannedConfiguration:
        """The configuration with the best prediction."""
        return max(self.configurations, key=lambda entry: entry.predicted_tokens_per_second)

    @property
    def measured_best(self) -> PlannedConfiguration | None:
        """The configuration with the best measured speed, None if nothing was measured."""
        return max(self.measured, key=lambda entry: entry.tokens_per_second or 0.0, default=None)

    @property
    def regret(self) -> float | None:
        """The time of the planned best over that of the measured best, less 1; None if the former was not measured.

        Times are those of a token, because batches may differ within a sweep.
        """
        best, planned = self.measured_best, self.planned_best.tokens_per_second
        return best.tokens_per_second / planned - 1 if best and best.tokens_per_second and planned else None

    def sentence(self) -> str:
        """Return what came of the validation."""
        of_all = f"{len(self.measured)} of {count_text(self.combinations, 'configuration')} measured"
        best, planned = self.measured_best, self.planned_best
        if best is None:
            return f"Plan: nothing was measured that could validate it ({of_all})."
        if self.regret is None:
            return f"Plan: {planned.run_id} was predicted to be the fastest and has no measured speed ({of_all})."
        if best is planned:
            return f"Plan: {planned.run_id} was predicted to be the fastest, and was ({of_all})."
        return (
            f"Plan: {planned.run_id} was predicted to be the fastest and took {self.regret:.1%} more time than"
            f" {best.run_id}, which was ({of_all})."
        )


def write_plan_validation(comparison: ComparisonFolder, validation: PlanValidation) -> None:
    """Write the validation into the sweep's folder, with its regret."""
    best = validation.measured_best
    values = dataclasses.asdict(validation) | {
        "planned_best": validation.planned_best.run_id,
        "measured_best": best and best.run_id,
        "regret": validation.regret,
    }
    atomic_write_json(comparison.plan_validation, values)


def read_plan_validation(comparison: ComparisonFolder) -> PlanValidation | None:
    """Return the validation in a sweep's folder; None if there is none, or none that can be read."""
    values = read_json_object(comparison.plan_validation)
    with suppress(UserError):
        known = {entry.name: values.get(entry.name) for entry in dataclasses.fields(PlanValidation)}
        validation = from_dict(PlanValidation, known)
        return validation if validation.configurations else None
    return None
