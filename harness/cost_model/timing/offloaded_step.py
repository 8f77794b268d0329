"""What offload changes in the time of a step: the update runs on the host, and a device waits for copies.

Imports no torch.
"""

import dataclasses

from harness.config.hardware import HardwareConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.cost_model.rank_memory import alike_ranks
from harness.cost_model.sharding import local_parameter_count
from harness.cost_model.stage_activations import stage_activations
from harness.cost_model.timing.offload_time import OffloadedWork, copy_seconds, host_update_seconds
from harness.cost_model.timing.step_time import StepTime
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths


def copies_are_free(config: RunConfig, layout: Layout, hardware: HardwareConfig, device: Device) -> bool:
    """Return whether nothing is copied between a device and its host, or the speed of that is not known."""
    offloads = layout.offload != "none" or config.checkpointing.offload_activations
    return not offloads or device == "cpu" or hardware.host_bandwidth is None


def with_host_update(
    config: RunConfig, layout: Layout, hardware: HardwareConfig, device: Device, time: StepTime
) -> StepTime:
    """Return the time of a step whose update runs on the host, if that is where the optimizer's state is."""
    bandwidth = hardware.host_bandwidth
    if layout.offload == "none" or bandwidth is None or copies_are_free(config, layout, hardware, device):
        return time
    update = host_update_seconds(time.optimizer_seconds, hardware.memory_bandwidth, bandwidth)
    return dataclasses.replace(time, optimizer_seconds=update)


def step_copy_seconds(
    config: RunConfig, layout: Layout, hardware: HardwareConfig, device: Device, widths: StateWidths, time: StepTime
) -> float:
    """Return the seconds of a step in which a device waits for copies to and from its host."""
    bandwidth = hardware.host_bandwidth
    if bandwidth is None or copies_are_free(config, layout, hardware, device):
        return 0.0
    shape = micro_batch_shape(config, layout, device)
    parameters, activation_bytes = 0.0, 0
    for stages, _ in alike_ranks(config.model, layout, config.checkpointing.every):
        if layout.offload != "none":
            counts = [local_parameter_count(config.model, stage, layout.tp, layout.vocabulary_tp) for stage in stages]
            parameters = max(parameters, sum(counts))
        if config.checkpointing.offload_activations:
            moved = sum(stage_activations(shape, stage, config.checkpointing).offloaded_bytes for stage in stages)
            activation_bytes = max(activation_bytes, moved)
    passes = (time.micro_batches, time.forward_seconds, time.backward_seconds)
    work = OffloadedWork(parameters, activation_bytes, *passes)
    return copy_seconds(config, layout, widths, bandwidth, work)
