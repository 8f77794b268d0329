"""The fit of the planner's parameters to published step times, and its errors on groups that were left out.

python -m tests.benchmarks.fit_planner                 prints the errors of five fits, each on half of the groups
python -m tests.benchmarks.fit_planner --all-groups    prints the parameters fitted to all groups
A parameter is changed by steps that become smaller, one after the other, as long as the objective falls.
"""

import argparse
import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import mean

from harness.config.hardware import HardwareConfig
from harness.config.stack import load_stack
from harness.config.stack_timing import StackTiming
from harness.cost_model.timing.step_time import estimate_step_time
from harness.runner.predicted_columns import described_devices
from tests.benchmarks.planner_errors import CLEARLY_APART, DOMINATED, H100, time_scores
from tests.support.published import PublishedRow, nanotron

OF_HARDWARE = (*("attention_efficiency", "inter_node_efficiency", "node_contention", "overlap_slowdown"),)

OF_STACK = (
    *("kernels_per_layer", "collective_launch_seconds", "collective_seconds_per_rank"),
    *("pipelined_collective_seconds_per_rank", "transfer_seconds", "transfer_growth", "inter_node_step_seconds"),
    *("elementwise_traffic", "logit_bytes", "optimizer_bytes", "step_seconds"),
)

# The best rate of a product that stas00/ml-engineering measured on H100 is 0.8 of the peak; other shares are at most 1.
MOST = {"matmul_efficiency": 0.8, "attention_efficiency": 1.0, "inter_node_efficiency": 1.0}

# Where every fit starts: no figure of the rows is in these.
START = {
    "matmul_efficiency": 0.7,
    "attention_efficiency": 0.5,
    "inter_node_efficiency": 0.8,
    "node_contention": 0.3,
    "overlap_slowdown": 0.3,
    "kernels_per_layer": 100.0,
    "collective_launch_seconds": 1e-4,
    "collective_seconds_per_rank": 1e-5,
    "pipelined_collective_seconds_per_rank": 1e-4,
    "transfer_seconds": 1e-5,
    "transfer_growth": 2.0,
    "inter_node_step_seconds": 1e-4,
    "elementwise_traffic": 1.0,
    "logit_bytes": 28.0,
    "optimizer_bytes": 30.0,
    "step_seconds": 0.02,
}

STEPS = (1.5, 1.2, 1.07, 1.02)

Parameters = dict[str, float]

SEEDS = range(5)


def with_parameters(parameters: Parameters) -> tuple[HardwareConfig, StackTiming]:
    """Return the hardware of H100 nodes and nanotron's timing with these parameters."""
    hardware, timing = described_devices()[H100], load_stack("nanotron").timing
    fitted = dataclasses.replace(hardware.fitted, **{name: parameters[name] for name in OF_HARDWARE})
    stack = {name: parameters[name] for name in OF_STACK} | {
        "kernels_per_layer": round(parameters["kernels_per_layer"])
    }
    return dataclasses.replace(hardware, fitted=fitted), dataclasses.replace(timing, **stack)  # type: ignore[arg-type]


def predict(rows: Sequence[PublishedRow], parameters: Parameters) -> list[float]:
    """Return the step times of rows."""
    hardware, timing = with_parameters(parameters)
    return [
        estimate_step_time(row.config, row.layout, hardware, timing, None, row.gpus_per_node).step_seconds
        for row in rows
    ]


def objective(rows: Sequence[PublishedRow]) -> Callable[[Parameters], float]:
    """Return the function to minimize: errors of the logarithm, and the share of pairs in the wrong order.

    An error counts at most as one of a factor of two. Rows below an MFU of 10 % count a tenth.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    measured = [row.measured["step_seconds"] for row in rows]
    weights = [1.0 if row.measured["mfu"] >= DOMINATED else 0.1 for row in rows]
    pairs = [
        (first, second) if measured[first] < measured[second] else (second, first)
        for members in groups.values()
        for first, second in combinations(members, 2)
        if max(measured[first], measured[second]) > CLEARLY_APART * min(measured[first], measured[second])
    ]
    best = {group: min(measured[index] for index in members) for group, members in groups.items()}

    def value(parameters: Parameters) -> float:
        predicted = predict(rows, parameters)
        errors = [
            min(math.log(2), abs(math.log(p / m))) * w for p, m, w in zip(predicted, measured, weights, strict=True)
        ]
        wrong = mean(predicted[first] >= predicted[second] for first, second in pairs)
        regrets = [
            min(1.0, measured[min(members, key=predicted.__getitem__)] / best[group] - 1)
            for group, members in groups.items()
        ]
        return 2 * sum(errors) / sum(weights) + 2 * wrong + 0.5 * mean(regrets)

    return value


def fit(rows: Sequence[PublishedRow], start: Parameters) -> Parameters:
    """Return the parameters at which no step of one of them makes the objective smaller."""
    score, parameters = objective(rows), dict(start)
    lowest = score(parameters)
    for step in STEPS:
        improves = True
        while improves:
            improves = False
            for name in parameters:
                for factor in (step, 1 / step):
                    changed = parameters | {name: parameters[name] * factor}
                    if changed[name] > MOST.get(name, math.inf):
                        continue
                    reached = score(changed)
                    if reached < lowest - 1e-5:
                        lowest, parameters, improves = reached, changed, True
    return parameters


def halves(rows: Sequence[PublishedRow], seed: int) -> tuple[list[PublishedRow], list[PublishedRow]]:
    """Return the rows of half of the groups, and those of the others."""
    groups = sorted({row.group for row in rows})
    random.Random(seed).shuffle(groups)
    fitted = set(groups[: len(groups) // 2])
    return [row for row in rows if row.group in fitted], [row for row in rows if row.group not in fitted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all-groups", action="store_true")
    arguments = parser.parse_args()
    rows = [row for row in nanotron.rows() if row.status == "ok" and "step_seconds" in row.measured]
    if arguments.all_groups:
        parameters = fit(rows, START)
        print(json.dumps({name: float(f"{value:.3g}") for name, value in parameters.items()}, indent=1))
        print(dict(time_scores(rows, predict(rows, parameters))))
        return
    for seed in SEEDS:
        fitted, held_out = halves(rows, seed)
        parameters = fit(fitted, START)
        print(seed, dict(time_scores(held_out, predict(held_out, parameters))), flush=True)


if __name__ == "__main__":
    main()
