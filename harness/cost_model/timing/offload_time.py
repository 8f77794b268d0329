"""What offload changes in the time of a step: the update runs on the host, and a device waits for copies.

The copies of model state are counted whole, as none of them is certain to have other work beside it. Those of
activations run beside the passes that make and use them, so that only what exceeds these is left. Left out are the
host's own limits: cores that are too slow for the update, and memory channels that devices share. Imports no torch.
"""

import dataclasses

from harness.config.hardware import HardwareConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.cost_model.rank_memory import alike_ranks
from harness.cost_model.sharding import local_parameter_count
from harness.cost_model.stage_activations import stage_activations
from harness.cost_model.timing.step_time import StepTime
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths

# The share of a PCIe link's bytes that are data: packets of 256 bytes with up to 24 of headers, sequence number and
# checksums (PCI Express Base Specification, transaction and data link layers).
PAYLOAD = 256 / 280


def with_host_update(layout: Layout, hardware: HardwareConfig, device: Device, time: StepTime) -> StepTime:
    """Return the time of a step whose update runs on the host, if that is where the optimizer's state is."""
    bandwidth = hardware.host_bandwidth
    if layout.offload == "none" or device == "cpu" or bandwidth is None:
        return time
    update = host_update_seconds(time.optimizer_seconds, hardware.memory_bandwidth, bandwidth)
    return dataclasses.replace(time, optimizer_seconds=update)


def host_update_seconds(update_seconds: float, memory_bandwidth: float, host_bandwidth: float) -> float:
    """Return the seconds of an update on the host whose bytes take so long in a device's memory.

    A rank's part of the host's memory bandwidth is taken to be that of its link: a node's memory channels over its
    devices are about as fast as these.
    """
    return update_seconds * memory_bandwidth / host_bandwidth


def step_copy_seconds(
    config: RunConfig, layout: Layout, hardware: HardwareConfig, device: Device, widths: StateWidths, time: StepTime
) -> float:
    """Return the seconds of a step in which a device waits for copies to and from its host, as far as these are known.

    Under offload of the optimizer (ZeRO-Offload, arXiv 2101.06840), a rank sends its share of gradients to the host
    once a step and takes its share of parameters back. Under offload of parameters it takes its shard for each
    gather, in forward and in backward, and sends its shard of gradients, in every micro-batch.
    """
    if device == "cpu" or hardware.host_bandwidth is None:
        return 0.0
    bandwidth, precision, seconds = hardware.host_bandwidth * PAYLOAD, config.precision, 0.0
    model, every = config.model, config.checkpointing.every
    if layout.offload != "none":
        parameters = max(
            sum(local_parameter_count(model, stage, layout.tp, layout.vocabulary_tp) for stage in stages)
            for stages, _ in alike_ranks(model, layout, every)
        )
        times, width = {
            "optimizer": (1, precision.compute_bytes),
            "parameters": (time.micro_batches, 2 * widths.gathered),
        }[layout.offload]
        shard = parameters / layout.shard_count(layout.offload)
        seconds += times * (shard * (width + precision.reduce_bytes)) / bandwidth
    if config.checkpointing.offload_activations:
        shape = micro_batch_shape(config, layout, device)
        moved = max(
            sum(stage_activations(shape, stage, config.checkpointing).offloaded_bytes for stage in stages)
            for stages, _ in alike_ranks(model, layout, every)
        )
        passes = (time.forward_seconds, time.backward_seconds)
        seconds += time.micro_batches * sum(max(0.0, moved / bandwidth - beside) for beside in passes)
    return seconds
