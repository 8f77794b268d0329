"""The columns of a row that are predicted, from before the run started."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import yaml

from harness.config.from_dict import from_dict
from harness.config.hardware import HardwareConfig
from harness.config.locations import conf_folders, files_in
from harness.config.stack import load_stack
from harness.cost_model import memory
from harness.cost_model.timing.interval import step_seconds_interval
from harness.cost_model.timing.offloaded_step import step_copy_seconds, with_host_update
from harness.cost_model.timing.step_time import StepTime, estimate_step_time
from harness.hardware.machine import Machine, processor_name
from harness.layout.model_profile import model_profile
from harness.records.schema import Cells, PredictedStepEntry
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
    """Return the predicted time of a step, None where predicted_step_time() has none."""
    step = predicted_step_time(plan)
    return None if step is None else step.step_seconds + predicted_copy_seconds(plan, step)


def predicted_step_time(plan: Plan) -> StepTime | None:
    """Return the predicted time of a step by its parts, without the copies of offload.

    None where the hardware is not described, its rate in the dtype of compute or the model's operators unknown.
    """
    hardware = run_hardware(plan)
    if hardware is None or not model_profile(plan.config.model).activations_are_known:
        return None
    timing = load_stack("harness").timing
    try:
        step = estimate_step_time(plan.config, plan.layout, hardware, timing, plan.widths, plan.ranks_per_node)
    except UserError:
        return None
    return with_host_update(plan.config, plan.layout, hardware, plan.machine.device, step)


def predicted_copy_seconds(plan: Plan, step: StepTime) -> float:
    """Return the predicted seconds in which a device waits for copies to and from its host."""
    hardware = run_hardware(plan)
    if hardware is None:
        return 0.0
    return step_copy_seconds(plan.config, plan.layout, hardware, plan.machine.device, plan.widths, step)


def predicted_step_entry(plan: Plan) -> PredictedStepEntry | None:
    """Return the record's part on the predicted step; None where predicted_step_time() has none or layers are compiled.

    The interval is that of the harness's own stack, as `harness plan` states it.
    """
    step = None if plan.config.train.compile else predicted_step_time(plan)
    if step is None:
        return None
    low, high = step_seconds_interval(step, load_stack("harness").timing, plan.nodes)
    forward, copies = step.micro_batches * step.forward_seconds, predicted_copy_seconds(plan, step)
    return {
        "step_seconds": step.step_seconds + copies,
        "low_seconds": low + copies,
        "high_seconds": high + copies,
        "forward_seconds": forward,
        "backward_seconds": step.compute_seconds - forward,
        "optimizer_seconds": step.optimizer_seconds,
        "other_seconds": step.other_seconds,
        "bubble_seconds": step.bubble_seconds,
        "copy_seconds": copies,
        "exposed_seconds": step.exposed_communication_seconds,
    }


def run_hardware(plan: Plan) -> HardwareConfig | None:
    """Return the hardware of a run: that of the cluster's own file, or of a file that describes this machine.

    The latter is for one node, because all that its nodes may differ in is what connects them.
    """
    hardware = plan.config.cluster.hardware
    return machine_hardware(plan.machine) if hardware is None and plan.nodes == 1 else hardware


def machine_hardware(machine: Machine) -> HardwareConfig | None:
    """Return the hardware of this machine's device, None where no file in conf/cluster describes it.

    A file that `harness calibrate` wrote counts before the others, and that of a CPU on its own processor alone.
    """
    for hardware in calibrated_devices():
        is_same_host = (hardware.processor, hardware.cores) == (processor_name(), machine.cores)
        if hardware.device_name == machine.device_name and (is_same_host or machine.device != "cpu"):
            return hardware
    return described_devices().get(machine.device_name)


@functools.cache
def described_devices() -> Mapping[str, HardwareConfig]:
    """Return the hardware in the files of conf/cluster by the name of its device; of several files the first counts.

    Calibrated ones are left out: they are of one machine.
    """
    described: dict[str, HardwareConfig] = {}
    for hardware in _hardware_in_files():
        if not hardware.calibrated:
            described.setdefault(hardware.device_name, hardware)
    return described


@functools.cache
def calibrated_devices() -> Sequence[HardwareConfig]:
    """Return the hardware in the files of conf/cluster that `harness calibrate` wrote, in the order of their names."""
    return [hardware for hardware in _hardware_in_files() if hardware.calibrated]


def _hardware_in_files() -> Iterator[HardwareConfig]:
    """Yield the hardware of every file in conf/cluster.

    A file with a mistake is left out, because it need not be that of the run.
    """
    for path in files_in(conf_folders(), "cluster").values():
        try:
            values = (yaml.safe_load(path.read_text()) or {}).get("hardware")
            hardware: HardwareConfig | None = from_dict(HardwareConfig, values, "cluster.hardware") if values else None
        except (yaml.YAMLError, AttributeError, UserError):
            continue
        if hardware is not None:
            yield hardware
