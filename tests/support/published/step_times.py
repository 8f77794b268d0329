"""The step times that the planner predicts for published rows, also with other parameters of clusters and stacks."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import yaml

from harness.config.from_dict import from_dict
from harness.config.hardware import HardwareConfig
from harness.config.locations import files_in
from harness.config.stack import StackTiming, load_stack
from harness.cost_model.timing.step_time import StepTime, estimate_step_time
from tests.support.published import PublishedRow


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
    values = of_owner(parameters or {}, row.stack)
    if "kernels_per_layer" in values:
        values["kernels_per_layer"] = round(values["kernels_per_layer"])
    return dataclasses.replace(stack_timing(row.stack), **values)


def step_time(row: PublishedRow, hardware: HardwareConfig, timing: StackTiming) -> StepTime:
    """Return the predicted time of a row's step and its parts."""
    return estimate_step_time(row.config, row.layout, hardware, timing, None, row.gpus_per_node)


def step_seconds(rows: Sequence[PublishedRow], parameters: Parameters | None = None) -> list[float]:
    """Return the predicted step times of rows."""
    return [step_time(row, row_hardware(row, parameters), row_timing(row, parameters)).step_seconds for row in rows]
