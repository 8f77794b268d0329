"""The columns of a row that are predicted, from before the run started."""

import functools
from collections.abc import Mapping

import yaml

from harness.config.from_dict import from_dict
from harness.config.hardware import HardwareConfig
from harness.config.locations import conf_folders, files_in
from harness.config.stack import load_stack
from harness.cost_model import memory
from harness.cost_model.timing.step_time import estimate_step_time
from harness.layout.model_profile import model_profile
from harness.records.schema import Cells
from harness.runner.plan import Plan
from harness.util.errors import UserError


def predicted_columns(plan: Plan) -> Cells:
    """Return the predicted peak, activations and step time of a run; none for compiled layers.

    The compiler decides what a compiled layer saves and allocates, and which of its operators become one kernel.
    """
    if plan.config.train.compile:
        return {}
    columns = memory.prediction_columns(plan.config, plan.layout, plan.widths, plan.machine.device)
    return {**columns, "predicted_step_seconds": predicted_step_seconds(plan)}


def predicted_step_seconds(plan: Plan) -> float | None:
    """Return the predicted time of a step; None where the hardware is not described, or the model's operators unknown.

    The hardware is that of the cluster's own file. On one node it is otherwise that of any file in conf/cluster that
    describes this device, because all that its nodes may differ in is what connects them.
    """
    hardware = plan.config.cluster.hardware
    if hardware is None and plan.nodes == 1:
        hardware = described_devices().get(plan.machine.device_name)
    if hardware is None or not model_profile(plan.config.model).activations_are_known:
        return None
    timing, ranks = load_stack("harness").timing, plan.layout.world_size // plan.nodes
    return estimate_step_time(plan.config, plan.layout, hardware, timing, plan.widths, ranks).step_seconds


@functools.cache
def described_devices() -> Mapping[str, HardwareConfig]:
    """Return the hardware in the files of conf/cluster by the name of its device; of several files the first counts.

    A file with a mistake is left out, because it need not be that of the run.
    """
    described: dict[str, HardwareConfig] = {}
    for path in files_in(conf_folders(), "cluster").values():
        try:
            values = (yaml.safe_load(path.read_text()) or {}).get("hardware")
            hardware: HardwareConfig | None = from_dict(HardwareConfig, values, "cluster.hardware") if values else None
        except (yaml.YAMLError, AttributeError, UserError):
            continue
        if hardware is not None:
            described.setdefault(hardware.device_name, hardware)
    return described
