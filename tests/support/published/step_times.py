"""The step times that the planner predicts for published rows, also with other parameters of clusters and stacks.

How far they are from the published ones: errors, order within groups, and regret of the choice.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from statistics import mean, median
from typing import Any, NamedTuple

import yaml

from harness.config.from_dict import from_dict
from harness.config.hardware import HardwareConfig
from harness.config.locations import files_in
from harness.config.stack import StackTiming, load_stack
from harness.cost_model.flops import model_flops
from harness.cost_model.timing.step_time import StepTime, estimate_step_time
from harness.hardware.machine import peak_flops
from tests.support.published import PublishedRow

CLEARLY_APART = 1.03  # the ratio of two measured step times from which on their order counts

LEAST_MFU = 0.1  # that a plan predicts of a layout which somebody would choose

ERROR, MEAN_ERROR = "median error of the step time", "mean error of the step time"
CHOSEN_ERROR = "median error where an MFU of 10 % is predicted"
ORDER, REGRET = "pairs in the right order", "slowdown of the chosen layout"


class Parameter(NamedTuple):
    """A parameter of the timing, by the clusters or stacks that share it: `owners` are names of files in conf."""

    owners: tuple[str, ...]
    name: str


Parameters = Mapping[Parameter, float]


@cache
def cluster_hardware(name: str) -> HardwareConfig:
    """Return the hardware in a file of conf/cluster."""
    values = yaml.safe_load(files_in("cluster")[name].read_text())
    hardware: HardwareConfig = from_dict(HardwareConfig, values["hardware"], "cluster.hardware")
    return hardware


@cache
def stack_timing(name: str) -> StackTiming:
    """Return the timing in a file of conf/stack."""
    return load_stack(name).timing


def of_owner(parameters: Parameters, owner: str) -> dict[str, Any]:
    """Return the values that a cluster or a stack has among parameters, by name."""
    return {parameter.name: value for parameter, value in parameters.items() if owner in parameter.owners}


def row_hardware(row: PublishedRow, parameters: Parameters | None = None) -> HardwareConfig:
    """Return the hardware on which a row was measured."""
    changes: dict[str, Any] = dict(row.hardware_changes)
    hardware = dataclasses.replace(cluster_hardware(row.cluster), **changes)
    fitted = of_owner(parameters or {}, row.cluster)
    return dataclasses.replace(hardware, fitted=dataclasses.replace(hardware.fitted, **fitted)) if fitted else hardware


def row_timing(row: PublishedRow, parameters: Parameters | None = None) -> StackTiming:
    """Return the timing of a row's stack."""
    values = dict(row.timing_changes) | of_owner(parameters or {}, row.stack)
    if "kernels_per_layer" in values:
        values["kernels_per_layer"] = round(values["kernels_per_layer"])
    return dataclasses.replace(stack_timing(row.stack), **values)


def step_time(row: PublishedRow, hardware: HardwareConfig, timing: StackTiming) -> StepTime:
    """Return the predicted time of a row's step and its parts."""
    return estimate_step_time(row.config, row.layout, hardware, timing, None, row.gpus_per_node)


def step_seconds(rows: Sequence[PublishedRow], parameters: Parameters | None = None) -> list[float]:
    """Return the predicted step times of rows."""
    return [step_time(row, row_hardware(row, parameters), row_timing(row, parameters)).step_seconds for row in rows]


def predicted_mfu(row: PublishedRow, seconds: float) -> float:
    """Return the MFU of a row whose step takes so long."""
    hardware = row_hardware(row)
    peak = hardware.peak_flops or peak_flops(hardware.device_name, row.config.precision.compute)
    assert peak is not None, row.cluster
    return model_flops(row.config) / (row.layout.world_size * peak * seconds)


def choices(rows: Sequence[PublishedRow]) -> dict[tuple[str, str, int, int], list[int]]:
    """Return the positions of rows by what they do: layouts compete for a group's model, batch and machine."""
    groups: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.group, row.cluster, row.config.train.global_batch, row.config.train.seq_len].append(index)
    return {place: indices for place, indices in groups.items() if len({rows[index].layout for index in indices}) > 1}


def time_scores(rows: Sequence[PublishedRow], predicted: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield the errors of step times, the share of pairs in the right order, and the regret of the choice.

    Groups without two layouts for the same batch have neither order nor regret.
    """
    measured = [row.measured["step_seconds"] for row in rows]
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    yield ERROR, median(errors)
    yield MEAN_ERROR, mean(errors)
    of_chosen = (predicted_mfu(row, seconds) >= LEAST_MFU for row, seconds in zip(rows, predicted, strict=True))
    chosen = [error for error, is_chosen in zip(errors, of_chosen, strict=True) if is_chosen]
    if chosen:
        yield CHOSEN_ERROR, median(chosen)
    groups = choices(rows).values()
    apart = [
        0.5
        if predicted[first] == predicted[second]
        else float((predicted[first] < predicted[second]) == (measured[first] < measured[second]))
        for group in groups
        for first, second in combinations(group, 2)
        if max(measured[first], measured[second]) > CLEARLY_APART * min(measured[first], measured[second])
    ]
    if apart:
        yield ORDER, mean(apart)
    if groups:
        yield REGRET, mean(regret(group, predicted, measured) for group in groups)


def regret(group: Sequence[int], predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return how much slower than the best of a group its layout is that is predicted to be the fastest.

    Of several that are predicted to be equally fast any may be chosen.
    """
    lowest = min(predicted[index] for index in group)
    chosen = mean(measured[index] for index in group if predicted[index] == lowest)
    return chosen / min(measured[index] for index in group) - 1
