"""The seconds of one training step: compute, exposed communication by axis, bubble and optimizer."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from harness.config.hardware import HardwareConfig
from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.config.stack import StackTiming
from harness.config.strategy import AXES
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.cost_model.pipeline import bubble_ratio
from harness.cost_model.timing.collectives import group_of, send_seconds
from harness.cost_model.timing.data_parallel_time import DataParallelTime
from harness.cost_model.timing.kernels import kernel_rates, rank_hardware
from harness.cost_model.timing.stage_time import RankStages, StageContext, stage_time
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import split_into_stages
from harness.layout.state_widths import StateWidths

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

    @property
    def step_seconds(self) -> float:
        """The seconds of the step."""
        parts = self.compute_seconds + sum(self.exposed_communication_seconds.values()) + self.bubble_seconds
        return parts + self.optimizer_seconds + self.other_seconds


@lru_cache(maxsize=4096)
def pipeline_stages(model: ModelConfig, layout: Layout) -> Mapping[RankStages, int]:
    """Return the different kinds of pipeline ranks, each with how many ranks are of it."""
    stages = split_into_stages(model, layout)
    ranks = (stages[place :: layout.pp] for place in range(layout.pp))
    return Counter(
        RankStages(
            sum(stage.layers for stage in own),
            any(stage.holds_embedding for stage in own),
            any(stage.holds_head for stage in own),
        )
        for own in ranks
    )


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
    hardware, timing = _with_stack(rank_hardware(hardware, min(gpus_per_node, layout.world_size)), timing)
    compute_bytes = config.precision.compute_bytes
    widths = widths or StateWidths(compute_bytes, compute_bytes, 0, gathered=compute_bytes)
    micro_batches = layout.grad_accumulation_steps(config.train)
    context = _stage_context(config, layout, hardware, timing, widths, gpus_per_node)
    kinds = pipeline_stages(config.model, layout)
    synchronized = {
        kind: DataParallelTime(config, layout, widths, hardware, timing, gpus_per_node, kind) for kind in kinds
    }
    times = {kind: stage_time(context, hardware, timing, kind) for kind in kinds}
    exposures = {kind: synchronized[kind].expose(time.forward, time.backward) for kind, time in times.items()}
    slowdown = hardware.fitted.overlap_slowdown
    per_micro = {
        kind: time.compute + time.tp + time.cp + exposed.per_micro_batch + slowdown * exposed.hidden_per_micro_batch
        for (kind, time), exposed in zip(times.items(), exposures.values(), strict=True)
    }
    slowest = max(per_micro, key=per_micro.__getitem__)
    time, exposed = times[slowest], exposures[slowest]
    hidden_per_step = max(each.hidden_per_step for each in exposures.values())
    compute = micro_batches * (time.compute + slowdown * exposed.hidden_per_micro_batch) + slowdown * hidden_per_step
    data = micro_batches * exposed.per_micro_batch + max(each.per_step for each in exposures.values())
    communication = dict.fromkeys(AXES, 0.0) | {"tp": micro_batches * time.tp, "cp": micro_batches * time.cp}
    communication[_first_axis(layout, layout.replica_axes)] += data * exposed.replica_share
    communication[_first_axis(layout, layout.sharding_axes)] += data * (1 - exposed.replica_share)
    bubble = 0.0
    if layout.pp_enabled:
        # A micro-batch passes every other stage once on its way (arXiv 2104.04473, section 2.2); interleaved stages let
        # it pass in shorter parts, and zero bubble fills a part of the wait.
        others = sum(per_micro[kind] * number for kind, number in kinds.items()) - per_micro[slowest]
        bubble = others * bubble_ratio(layout, micro_batches) / ((layout.pp - 1) / micro_batches)
        transfer = _transfer_seconds(config, layout, hardware, timing, gpus_per_node)
        communication["pp"] = transfer * (micro_batches * timing.blocking_transfers + layout.pp - 1)
    return StepTime(
        compute_seconds=compute,
        exposed_communication_seconds={axis: seconds for axis, seconds in communication.items() if seconds},
        bubble_seconds=bubble,
        optimizer_seconds=_optimizer_seconds(
            config, layout, hardware, timing, max(each.parameters for each in synchronized.values())
        ),
        other_seconds=_other_seconds(hardware, timing, micro_batches, layout.world_size / gpus_per_node),
        micro_batches=micro_batches,
        forward_seconds=time.forward,
        backward_seconds=time.backward,
        hidden_communication_seconds=hidden_per_step + micro_batches * exposed.hidden_per_micro_batch,
    )


@lru_cache(maxsize=64)
def _with_stack(hardware: HardwareConfig, timing: StackTiming) -> tuple[HardwareConfig, StackTiming]:
    """Return the hardware with the time that a stack adds to each step of a ring between nodes, and the stack on it.

    A CPU has no streams: there FSDP2 and DeepSpeed wait for each gather and reduction. DDP's reducer alone hands its
    buckets to the threads of the backend while backward goes on.
    """
    if hardware.is_cpu:
        timing = dataclasses.replace(timing, prefetches_parameters=False)
    latency = hardware.fitted.inter_node_latency + timing.inter_node_step_seconds
    fitted = dataclasses.replace(hardware.fitted, inter_node_latency=latency)
    return dataclasses.replace(hardware, fitted=fitted), timing


def _first_axis(layout: Layout, axes: tuple[str, ...]) -> str:
    """Return the first of these axes along which there are several ranks, whose name their communication has."""
    return next((axis for axis in axes if layout.axis_sizes[axis] > 1), axes[0])


def _stage_context(
    config: RunConfig,
    layout: Layout,
    hardware: HardwareConfig,
    timing: StackTiming,
    widths: StateWidths,
    gpus_per_node: int,
) -> StageContext:
    """Return what decides a stage's seconds.

    What the host does in a layer for one micro-batch beside its kernels counts as launches that take as long.
    """
    launches = float(timing.divided_layer_launches if layout.tp_enabled else 0)
    if layout.zero_stage == 3 and layout.shard_count("parameters") > 1:
        of_parameters = len(model_profile(config.model).layer_shapes) * timing.parameter_gather_launches
        each = of_parameters if widths.gathers_for_each_use else timing.layer_gather_launches
        launches += 3 * each  # gathered in forward and in backward, and its gradient reduced
    return StageContext(
        micro_batch_shape(config, layout, "cpu" if hardware.is_cpu else "cuda"),
        config.checkpointing,
        group_of(layout, ("tp",), gpus_per_node),
        group_of(layout, ("cp",), gpus_per_node),
        layout.pp_enabled,
        config.train.compile,
        launches,
    )


def _transfer_seconds(
    config: RunConfig, layout: Layout, hardware: HardwareConfig, timing: StackTiming, gpus_per_node: int
) -> float:
    """Return the seconds in which a stage's hidden states, and gradients as large, pass to and from its neighbors."""
    train, parts = config.train, layout.tp if layout.sequence_parallel else 1
    hidden = train.micro_batch * train.seq_len / layout.cp * config.model.hidden_size
    stride = layout.world_size // layout.pp
    sending_seconds = send_seconds(hidden * config.precision.compute_bytes / parts, stride, gpus_per_node, hardware)
    growth: float = max(1.0, layout.world_size / gpus_per_node / 2) ** timing.transfer_growth
    return 2 * (sending_seconds + timing.transfer_seconds * growth)


def _other_seconds(hardware: HardwareConfig, timing: StackTiming, micro_batches: int, nodes: float) -> float:
    """Return the seconds of a step beside its parts.

    They are what a host that runs kernels itself takes for micro-batches outside their layers, and what a stack adds to
    each micro-batch on several nodes.
    """
    seconds = timing.step_seconds
    if hardware.is_cpu:
        seconds += micro_batches * timing.micro_batch_launches * hardware.fitted.launch_seconds
    if nodes > 1:
        growth: float = (nodes / 64) ** timing.inter_node_micro_batch_growth
        seconds += micro_batches * timing.inter_node_micro_batch_seconds * growth
    return seconds


def _optimizer_seconds(
    config: RunConfig, layout: Layout, hardware: HardwareConfig, timing: StackTiming, parameters: float
) -> float:
    """Return the seconds of gradient norm and update, by the bytes of a rank's part of the optimizer state."""
    norm = GRADIENT_NORM_BYTES * parameters / layout.shard_count("gradients")
    update = timing.optimizer_bytes * parameters / layout.shard_count("optimizer")
    return kernel_rates(hardware, config.precision.compute).elementwise_seconds(norm + update)
