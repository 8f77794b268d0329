"""The prediction of one rank's memory from configuration, layout and its engine's widths. Imports no torch.

The allocator's fragmentation and what NCCL needs outside torch's allocator are left out. On a CPU the copies are
included that gloo makes while it gathers and reduces; when its threads free them late, a run needs more. The tensors
that tensor and pipeline parallelism keep were checked on CPU; for CUDA they are derived.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.schema import Device, RunConfig
from harness.cost_model.activations import loss_bytes
from harness.cost_model.buffers import WORKSPACE_BYTES, buffer_tensors, transient_buffers
from harness.cost_model.rank_memory import (
    RankPeak,
    highest_rank,
    max_offloaded_bytes,
    max_saved_bytes,
    rank_backward_starts,
    rank_cost,
    rank_stages,
)
from harness.cost_model.stage_activations import host_gradient_bytes
from harness.cost_model.stage_memory import Bytes, local_parameter_count, stage_costs
from harness.cost_model.transient_buffers import ONLY_PASS, Pass
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, whole_model
from harness.layout.state_widths import StateWidths

# Bytes outside torch's allocator. cpu: resident size of a rank after three steps of DeepSpeed ZeRO-3 on a 66 kB model
# (psutil's rss, torch 2.13, DeepSpeed 0.19.8: 0.399e9; plain torch 0.343e9). cuda: a context and its libraries,
# as commonly reported, not measured here.
PROCESS_BYTES = {"cpu": 400_000_000, "cuda": 500_000_000}


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes of one rank, each part at its own maximum; `at_peak` has the parts at the moment of the peak."""

    parameter_bytes: int  # at rest between steps
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # the most kept for backward, log-probabilities included
    loss_bytes: int  # logits and cross-entropy
    communication_buffer_bytes: int
    host_bytes: int  # offloaded to the host, pinned; 0 on a CPU, where it is part of all else
    process_bytes: int  # interpreter, libraries, context: outside torch's allocator; only for whether it fits a host
    at_peak: Bytes

    @property
    def peak_bytes(self) -> int:
        """The bytes that torch's allocator holds at the worst moment of a step."""
        return sum(self.at_peak.values())

    @property
    def needed_bytes(self) -> int:
        """The bytes that a device must have: of tensors, and outside torch's allocator."""
        return self.peak_bytes + self.process_bytes


def estimate_memory(config: RunConfig, layout: Layout, widths: StateWidths, device: Device = "cpu") -> MemoryEstimate:
    """Return the memory of the rank with the highest peak.

    `device` is cpu or cuda: torch keeps different tensors on each. Model state is ZeRO's (arXiv 1910.02054, section 5).
    The peak is the worst moment of the step's backwards (at a loss, at a head, in a layer, in its attention, or at
    an end), or it is the optimizer's. A model whose activations are not known has a lower bound of it. Raises
    UserError if the global batch leaves a remainder.
    """
    if not model_profile(config.model).activations_are_known:
        return lower_bound_estimate(config, layout, widths, device)
    highest = rank_estimate(highest_rank(config, layout, widths, device))
    if device == "cpu":
        return highest
    return dataclasses.replace(highest, at_peak=highest.at_peak | {"workspaces": WORKSPACE_BYTES})


def lower_bound_estimate(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> MemoryEstimate:
    """Return state and buffers alone, which are the least that the peak of a model with unknown activations can be."""
    stage = whole_model(config.model)
    total = local_parameter_count(config.model, stage, layout.tp, layout.vocabulary_tp)
    parameter_bytes, gradient_bytes, optimizer_bytes = (
        -(-width * total // layout.shard_count(kind))
        for kind, width in (
            ("parameters", widths.parameters),
            ("gradients", widths.gradients),
            ("optimizer", widths.optimizer),
        )
    )
    buffers = sum(buffer_tensors(config, layout, widths, [stage]).values()) + widths.backward_buffer_bytes
    (host_gradients,) = host_gradient_bytes(widths, layout, [total])
    gradient_bytes += host_gradients
    at_peak = {"parameters": parameter_bytes, "optimizer": optimizer_bytes, "gradients": gradient_bytes}
    host_bytes = 0 if device == "cpu" else sum(at_peak.pop(kind) for kind in layout.offloaded_state)
    # Parameters are whole in forward, when there are no gradients yet.
    buffers += max(0, transient_buffers(config, layout, widths, stage, device).forward - gradient_bytes)
    at_peak["buffers"] = buffers
    return MemoryEstimate(
        parameter_bytes,
        gradient_bytes,
        optimizer_bytes,
        activation_bytes=0,
        loss_bytes=0,
        communication_buffer_bytes=buffers,
        host_bytes=host_bytes,
        process_bytes=PROCESS_BYTES[device],
        at_peak=at_peak,
    )


def estimate_rank_memory(
    config: RunConfig, layout: Layout, widths: StateWidths, device: Device, pp_rank: int, stages: Sequence[Stage]
) -> MemoryEstimate:
    """Return the memory of this rank of the pipeline, which has these stages; device is cpu or cuda."""
    starts = rank_backward_starts(config, layout, pp_rank)
    return rank_estimate(RankPeak(rank_cost(config, layout, widths, device, tuple(stages)), pp_rank, starts))


def rank_estimate(peak: RankPeak) -> MemoryEstimate:
    """Return the memory of a rank whose worst moment is known."""
    cost, costs = peak.cost, peak.cost.costs
    offloaded = 0 if cost.device == "cpu" else max_offloaded_bytes(costs, peak.starts)
    return MemoryEstimate(
        cost.parameter_bytes,
        cost.gradient_bytes,
        cost.optimizer_bytes,
        activation_bytes=max_saved_bytes(costs, peak.starts),
        loss_bytes=sum(loss_bytes(part.shape) for part in costs if part.stage.holds_head),
        communication_buffer_bytes=cost.buffer_bytes
        + max(part.transient(moment).largest for part in costs for moment in (ONLY_PASS, Pass(False, False, False))),
        host_bytes=cost.offloaded_state_bytes + offloaded,
        process_bytes=PROCESS_BYTES[cost.device],
        at_peak=dict(peak.at_peak),
    )


def activation_bytes(config: RunConfig, layout: Layout, device: Device, pp_rank: int) -> int:
    """Return the most that this rank of the pipeline keeps for backward, log-probabilities included."""
    costs = stage_costs(config, layout, device, rank_stages(config.model, layout, pp_rank))
    return max_saved_bytes(costs, rank_backward_starts(config, layout, pp_rank))


def offloaded_activation_bytes(config: RunConfig, layout: Layout, device: Device, pp_rank: int) -> int:
    """Return the most that activation offload keeps on the host for this rank of the pipeline; 0 without it."""
    costs = stage_costs(config, layout, device, rank_stages(config.model, layout, pp_rank))
    return max_offloaded_bytes(costs, rank_backward_starts(config, layout, pp_rank))
