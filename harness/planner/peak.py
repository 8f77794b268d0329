"""The rank and the phase of a predicted peak, and what torch's allocator reserves for it. Imports no torch."""

from dataclasses import dataclass

from harness.config.schema import Device, RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.memory import MemoryEstimate
from harness.cost_model.rank_memory import RankPeak, highest_rank, rebuilds_buckets_beside_gradients
from harness.cost_model.stack_memory import RankMemory, predict_rank_memory, ranks, reserved_bytes
from harness.cost_model.stack_moments import model_state
from harness.cost_model.stack_parameters import rank_parts
from harness.cost_model.step_peaks import PARTS
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.planner.hf_memory import nearest_run


@dataclass(frozen=True)
class PredictedPeak:
    """The memory of the rank with the highest peak, which rank it is, and in which phase of a step it peaks."""

    memory: RankMemory
    rank: int  # the first of the world's ranks at this place of the pipeline
    phase: str  # forward, backward or optimizer


def predicted_peak(
    config: RunConfig,
    layout: Layout,
    stack: StackConfig,
    widths: StateWidths,
    device: Device,
    estimate: MemoryEstimate,
    compute_capability: int,
) -> PredictedPeak:
    """Return the peak of a layout under a stack on a device, cpu or cuda, whose memory is this estimate."""
    per_stage = layout.world_size // layout.pp
    if stack.memory.kind != "harness":
        by_rank = {rank: predict_rank_memory(config, layout, stack, rank, compute_capability) for rank in ranks(layout)}
        highest = max(by_rank, key=lambda rank: by_rank[rank].estimate.peak_bytes)
        phase = phase_of_stack(config, layout, stack, highest, by_rank[highest])
        return PredictedPeak(by_rank[highest], highest * per_stage, phase)
    resting = sum(estimate.at_peak.get(part, 0) for part in ("parameters", "optimizer", "workspaces"))
    # A CPU's allocator takes nothing beyond what is requested.
    reserved = estimate.peak_bytes if device == "cpu" else reserved_bytes(stack.memory, estimate, 0, 0)
    peak = highest_rank(nearest_run(config) if config.model.family == "hf" else config, layout, widths, device)
    return PredictedPeak(RankMemory(estimate, resting, reserved), peak.pp_rank * per_stage, phase_of(peak))


def phase_of(peak: RankPeak) -> str:
    """Return the phase of a rank's peak: backward, unless it is one of the moments outside of backward.

    The last of these is the forward in which DDP rebuilds its buckets, if it does; others are the optimizer's.
    """
    cost = peak.cost
    moving = {part: peak.at_peak[part] for part in PARTS}
    rebuilds = rebuilds_buckets_beside_gradients(cost.config, cost.layout)
    for position, other in enumerate(cost.other_peaks):
        if moving == other | {"buffers": other["buffers"] + cost.buffer_bytes}:
            return "forward" if rebuilds and position == len(cost.other_peaks) - 1 else "optimizer"
    return "backward"


def phase_of_stack(config: RunConfig, layout: Layout, stack: StackConfig, pp_rank: int, memory: RankMemory) -> str:
    """Return the phase of a rank's peak under another stack: the loss ends forward, and activations are backward's."""
    parts = rank_parts(config.model, layout, stack.memory, pp_rank)
    stepping = model_state(config, layout, stack.memory, parts).in_optimizer_step()
    at_peak = memory.estimate.at_peak
    if all(at_peak[part] == size for part, size in stepping.items()):
        return "optimizer"
    return "forward" if at_peak["loss"] else "backward"
