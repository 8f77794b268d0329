"""The ranges of measured over predicted step time in conf/stack, and how many rows of other groups they hold.

python -m tests.benchmarks.time_intervals

For each stack it prints `measured_over_predicted` fitted to all groups, and for five seeds the share of rows inside and
the median half-width on the half of the groups that the range was not fitted to.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from harness.cost_model.timing.step_time import StepTime
from tests.benchmarks.fit_planner import SEEDS, fitted_groups
from tests.support.published import PublishedRow, llm_foundry, modalities, nanotron, vtrain
from tests.support.published.step_times import is_scored, row_hardware, row_timing, step_time

OUTSIDE = 0.03  # the share of rows beyond each end of the range that is fitted, less than the one in twenty it is for

STACKS: dict[str, Callable[[], Sequence[PublishedRow]]] = {
    "nanotron": nanotron.rows,
    "llm_foundry": llm_foundry.rows,
    "modalities": modalities.rows,
    "megatron_deepspeed": lambda: (*vtrain.single_node_rows(), *vtrain.multi_node_rows()),
}


@dataclass(frozen=True)
class TimedRow:
    """A published row and its predicted step."""

    row: PublishedRow
    time: StepTime

    @property
    def ratio(self) -> float:
        """The measured over the predicted seconds."""
        return self.row.measured["step_seconds"] / self.time.step_seconds

    def half_width(self, measured_over_predicted: tuple[float, float]) -> float:
        """Return half of the interval's width in units of the predicted time."""
        low, high = self.interval(measured_over_predicted)
        return (high - low) / 2 / self.time.step_seconds

    def interval(self, measured_over_predicted: tuple[float, float]) -> tuple[float, float]:
        """Return the interval of a stack with this range."""
        timing = replace(row_timing(self.row), measured_over_predicted=measured_over_predicted)
        return self.time.interval(timing, self.row.nodes)

    def is_inside(self, measured_over_predicted: tuple[float, float]) -> bool:
        """Return whether the measured time lies in the interval."""
        low, high = self.interval(measured_over_predicted)
        return low <= self.row.measured["step_seconds"] <= high


def timed_rows(stack: str) -> list[TimedRow]:
    """Return the scored rows of a stack with their predictions."""
    rows = [row for row in STACKS[stack]() if row.status == "ok" and "step_seconds" in row.measured and is_scored(row)]
    return [TimedRow(row, step_time(row, row_hardware(row), row_timing(row))) for row in rows]


def fit_range(rows: Sequence[TimedRow]) -> tuple[float, float]:
    """Return the range of measured over predicted time that leaves OUTSIDE of the rows beyond each end.

    Ratios are taken to the power that makes them those of a step without exposed communication.
    """
    scaled = [math.log(entry.ratio) / entry.time.spread(entry.row.nodes) for entry in rows]
    low, high = np.quantile(scaled, (OUTSIDE, 1 - OUTSIDE))
    return math.exp(min(0.0, low)), math.exp(max(0.0, high))


def held_out(rows: Sequence[TimedRow], seed: int) -> tuple[float, float]:
    """Return the share of rows inside and the median half-width on the groups that a fit to half of them left out."""
    fitted = fitted_groups([entry.row for entry in rows], seed)
    measured_over_predicted = fit_range([entry for entry in rows if entry.row.group in fitted])
    others = [entry for entry in rows if entry.row.group not in fitted]
    inside = sum(entry.is_inside(measured_over_predicted) for entry in others) / len(others)
    return inside, median(entry.half_width(measured_over_predicted) for entry in others)


def main() -> None:
    for stack in STACKS:
        rows = timed_rows(stack)
        low, high = fit_range(rows)
        inside = sum(entry.is_inside((low, high)) for entry in rows) / len(rows)
        width = median(entry.half_width((low, high)) for entry in rows)
        print(f"{stack}: {len(rows)} rows, measured_over_predicted: [{low:.3f}, {high:.3f}]", end="")
        print(f", {inside:.1%} inside, median half-width {width:.1%}")
        for seed in SEEDS:
            share, half_width = held_out(rows, seed)
            print(f"  seed {seed}, the other half: {share:.1%} inside, median half-width {half_width:.1%}")


if __name__ == "__main__":
    main()
