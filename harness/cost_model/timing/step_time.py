"""The seconds of one training step: compute, exposed communication by axis, bubble, optimizer and copies of offload."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.config.hardware import HardwareConfig
from harness.config.schema import RunConfig
from harness.config.stack import StackTiming
from harness.config.strategy import AXES
from harness.cost_model.communication import tied_bytes
from harness.cost_model.optimizer_state import BF16_BYTES, gathered_updates, update_cost
from harness.cost_model.pipeline import bubble_ratio
from harness.cost_model.rank_memory import alike_ranks
from harness.cost_model.shard_groups import local_parameter_count
from harness.cost_model.stage_activations import stage_activations
from harness.cost_model.timing.collectives import gather_seconds, send_seconds
from harness.cost_model.timing.kernels import PAYLOAD, host_update_seconds, kernel_rates, rank_hardware
from harness.cost_model.timing.layer_time import MicroBatchTime, StepSetting, layer_time
from harness.cost_model.timing.stage_time import rank_time
from harness.layout.layout import Layout
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths

# The share of the traffic of operators between matrix products that remains where torch.compile fuses those that follow
# each other: what comes from a product is read and what goes into the next is written, and nothing between them.
COMPILED_TRAFFIC = 0.5

GRADIENT_NORM_BYTES = 4  # read for each gradient to find the global norm, in fp32


@dataclass(frozen=True)
class StepTime:
    """The seconds of one training step of the slowest rank, and their parts, which add up."""

    compute_seconds: float
    exposed_communication_seconds: Mapping[str, float]  # by axis
    bubble_seconds: float
    optimizer_seconds: float
    other_seconds: float  # of the step as a whole, beside the parts
    micro_batches: int
    forward_seconds: float  # of the slowest stage, for one micro-batch
    backward_seconds: float
    hidden_communication_seconds: float  # data-parallel communication that runs beside compute
    copy_seconds: float = 0.0  # in which a device waits for copies to and from its host

    @property
    def step_seconds(self) -> float:
        """The seconds of the step."""
        parts = self.compute_seconds + sum(self.exposed_communication_seconds.values()) + self.bubble_seconds
        return parts + self.optimizer_seconds + self.other_seconds + self.copy_seconds


def estimate_step_time(
    config: RunConfig,
    layout: Layout,
    hardware: HardwareConfig,
    timing: StackTiming,
    widths: StateWidths | None = None,
    gpus_per_node: int = 8,
) -> StepTime:
    """Return the predicted time of a step of this layout on so many GPUs of each node.

    `widths` are those of an engine; without them parameters are gathered in the dtype of compute. Raises UserError if
    the device's peak FLOP/s in the dtype of compute are unknown.
    """
    hardware = rank_hardware(hardware, min(gpus_per_node, layout.world_size))
    hardware, timing = _with_stack(hardware, timing, config.train.compile)
    compute_bytes = config.precision.compute_bytes
    widths = widths or StateWidths(compute_bytes, compute_bytes, compute_bytes, 0, gathered=compute_bytes)
    micro_batches = layout.grad_accumulation_steps(config.train)
    step = StepSetting(config, layout, hardware, timing, widths, gpus_per_node)
    kinds, layer, slowdown = alike_ranks(config.model, layout, 1), layer_time(step), hardware.fitted.overlap_slowdown
    ranks = [rank_time(step, layer, stages) for stages, _ in kinds]
    slowest = max(ranks, key=lambda rank: rank.per_micro_batch)
    passes, hidden_per_step = slowest.passes, max(rank.hidden_per_step for rank in ranks)
    data = micro_batches * slowest.data_per_micro_batch + max(rank.data_per_step for rank in ranks)
    of_passes = {"tp": passes.tp, "cp": passes.cp, "ep": passes.ep}
    communication = dict.fromkeys(AXES, 0.0) | {axis: micro_batches * seconds for axis, seconds in of_passes.items()}
    communication[_first_axis(layout, layout.replica_axes)] += data * slowest.replica_share
    communication[_first_axis(layout, layout.sharding_axes)] += data * (1 - slowest.replica_share)
    communication[_first_axis(layout, layout.sharding_axes)] += _update_gather_seconds(step, kinds)
    if layout.pp_enabled:
        transfers = micro_batches * timing.blocking_transfers + layout.pp - 1
        communication["pp"] = _transfer_seconds(step) * transfers + _tied_seconds(step, [stages for stages, _ in kinds])
    # A micro-batch passes every other stage once on its way (arXiv 2104.04473, section 2.2); interleaved stages let it
    # pass in shorter parts, and zero bubble fills a part of the wait.
    every = sum(rank.per_micro_batch * len(places) for rank, (_, places) in zip(ranks, kinds, strict=True))
    bubble = (every - slowest.per_micro_batch) * bubble_ratio(layout, micro_batches)
    compute = micro_batches * (passes.forward + passes.backward)
    hidden = micro_batches * slowest.hidden_per_micro_batch + hidden_per_step
    return StepTime(
        compute + slowdown * hidden,
        {axis: seconds for axis, seconds in communication.items() if seconds},
        bubble_seconds=bubble * micro_batches / max(1, layout.pp - 1),
        optimizer_seconds=_optimizer_seconds(step, max(rank.parameters for rank in ranks), [own for own, _ in kinds]),
        other_seconds=_other_seconds(step, micro_batches),
        micro_batches=micro_batches,
        forward_seconds=passes.forward,
        backward_seconds=passes.backward,
        hidden_communication_seconds=hidden,
        copy_seconds=_copy_seconds(step, passes, micro_batches),
    )


@lru_cache(maxsize=64)
def _with_stack(hardware: HardwareConfig, timing: StackTiming, is_compiled: bool) -> tuple[HardwareConfig, StackTiming]:
    """Return the hardware with the time that a stack adds to each step of a ring between nodes, and the stack on it.

    A CPU has no streams: there FSDP2 and DeepSpeed wait for each gather and reduction. DDP's reducer alone hands its
    buckets to the threads of the backend while backward goes on. A compiler fuses the operators of a layer.
    """
    if is_compiled:
        traffic = timing.elementwise_traffic * COMPILED_TRAFFIC
        timing = dataclasses.replace(timing, elementwise_traffic=traffic)
    if hardware.is_cpu:
        timing = dataclasses.replace(timing, prefetches_parameters=False)
    latency = hardware.fitted.inter_node_latency + timing.inter_node_step_seconds
    fitted = dataclasses.replace(hardware.fitted, inter_node_latency=latency)
    return dataclasses.replace(hardware, fitted=fitted), timing


def _first_axis(layout: Layout, axes: tuple[str, ...]) -> str:
    """Return the first of these axes along which there are several ranks, whose name their communication has."""
    return next((axis for axis in axes if layout.axis_sizes[axis] > 1), axes[0])


def _transfer_seconds(step: StepSetting) -> float:
    """Return the seconds in which a stage's hidden states, and gradients as large, pass to and from its neighbors."""
    layout = step.layout
    return 2 * send_seconds(step.shape.hidden_bytes, layout.world_size // layout.pp, step.gpus_per_node, step.hardware)


def _tied_seconds(step: StepSetting, kinds: Sequence[Sequence[Stage]]) -> float:
    """Return the seconds in which both ends of a pipeline exchange the gradients of a tied table, once a step."""
    layout = step.layout
    sent = max(tied_bytes(step.config, layout, stage, None) for stages in kinds for stage in stages)
    stride = layout.world_size // layout.pp * (layout.pp - 1)
    return send_seconds(sent, stride, step.gpus_per_node, step.hardware) if sent else 0.0


def _update_gather_seconds(step: StepSetting, kinds: Sequence[tuple[tuple[Stage, ...], object]]) -> float:
    """Return the seconds in which the ranks that have most of them gather updates that need whole matrices."""
    group = step.group(*step.layout.sharding_axes)
    sizes = [
        [size for stage in stages for size in gathered_updates(step.config, step.layout, stage, is_padded=True)]
        for stages, _ in kinds
    ]
    return max(sum(gather_seconds(BF16_BYTES * size, group, step.hardware) for size in own) for own in sizes)


def _other_seconds(step: StepSetting, micro_batches: int) -> float:
    """Return the seconds of a step beside its parts.

    A host that runs kernels itself takes time for micro-batches outside their layers, too.
    """
    launches = step.timing.micro_batch_launches * step.hardware.is_cpu
    return step.timing.step_seconds + micro_batches * launches * step.hardware.fitted.launch_seconds


def _optimizer_seconds(step: StepSetting, parameters: float, kinds: Sequence[tuple[Stage, ...]]) -> float:
    """Return the seconds of gradient norm and update, by the bytes of a rank's part of the optimizer state.

    The update runs on the host if that is where the state is, whose cores and memory channels are not counted.
    """
    hardware, layout = step.hardware, step.layout
    norm = GRADIENT_NORM_BYTES * parameters / layout.shard_count("gradients")
    rates, optimizer = kernel_rates(hardware, step.config.precision.compute), step.config.optimizer.name
    costs = [update_cost(optimizer, step.config.model, stages) for stages in kinds]
    moved = step.timing.optimizer_bytes + max(extra for extra, _ in costs)
    update = moved * parameters / layout.shard_count("optimizer")
    seconds = (norm + update) / rates.memory_bytes + max(flops for _, flops in costs) / rates.matmul_flops
    if layout.offload == "none" or hardware.is_cpu or hardware.host_bandwidth is None:
        return seconds
    return host_update_seconds(seconds, hardware.memory_bandwidth, hardware.host_bandwidth)


def _copy_seconds(step: StepSetting, passes: MicroBatchTime, micro_batches: int) -> float:
    """Return the seconds of a step in which a device waits for copies to and from its host, as far as these are known.

    Under offload of the optimizer (ZeRO-Offload, arXiv 2101.06840), a rank sends its share of gradients to the host
    once a step and takes its share of parameters back. Under offload of parameters it takes its shard for each
    gather, in forward and in backward, and sends its shard of gradients, in every micro-batch. These copies are counted
    whole, as none of them is certain to have other work beside it; those of activations run beside the passes that make
    and use them, so that only what exceeds these is left.
    """
    config, layout, hardware = step.config, step.layout, step.hardware
    model, checkpointing, precision = config.model, config.checkpointing, config.precision
    offloads = layout.offload != "none" or checkpointing.offload_activations
    if not offloads or hardware.is_cpu or hardware.host_bandwidth is None:
        return 0.0
    parameters = moved = 0
    for stages, _ in alike_ranks(model, layout, checkpointing.every):
        counts = [local_parameter_count(model, stage, layout.tp, layout.vocabulary_tp) for stage in stages]
        activations = [stage_activations(step.shape, stage, checkpointing).offloaded_bytes for stage in stages]
        parameters, moved = max(parameters, sum(counts)), max(moved, sum(activations))
    times, width, shards = {
        "none": (0, 0, 1),
        "optimizer": (1, precision.compute_bytes, layout.shard_count("optimizer")),
        "parameters": (micro_batches, 2 * step.widths.gathered, layout.shard_count("parameters")),
    }[layout.offload]
    bandwidth = hardware.host_bandwidth * PAYLOAD
    state = times * parameters / shards * (width + precision.reduce_bytes) / bandwidth
    beside = (passes.forward, passes.backward)
    return state + micro_batches * sum(max(0.0, moved / bandwidth - seconds) for seconds in beside)
