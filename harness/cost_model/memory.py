"""The prediction of one rank's memory from configuration, layout and its engine's widths. Imports no torch.

The padding of shards, the allocator's fragmentation and what a collective needs beside its result are left out. The
tensors that tensor and pipeline parallelism keep were checked on CPU; for CUDA they are derived.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.activations import loss_tensors
from harness.cost_model.buffers import buffer_tensors, keeps_grad_buffers, transient_buffers
from harness.cost_model.deepspeed_memory import (
    gloo_gather_peak,
    gradient_copy_bytes,
    partition_elements,
    summed_gradient_bytes,
)
from harness.cost_model.optimizer_memory import optimizer_parameter_count, optimizer_temporary_bytes
from harness.cost_model.pipeline import BackwardStart, backward_starts
from harness.cost_model.stage_activations import host_gradient_bytes
from harness.cost_model.stage_memory import Bytes, StageCost, local_parameter_count, stage_costs
from harness.cost_model.step_peaks import step_peaks
from harness.cost_model.workspaces import WORKSPACE_BYTES
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, split_into_stages, whole_model
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


def all_stages(model: ModelConfig, layout: Layout) -> list[Stage]:
    """Return the model's stages in order; without a pipeline it is one."""
    return split_into_stages(model, layout) if layout.pp_enabled else [whole_model(model)]


def rank_stages(model: ModelConfig, layout: Layout, pp_rank: int) -> list[Stage]:
    """Return the stages of this rank of the pipeline."""
    return all_stages(model, layout)[pp_rank :: layout.pp]


def rank_backward_starts(config: RunConfig, layout: Layout, pp_rank: int) -> list[BackwardStart]:
    """Return the backwards of a rank's step; without a pipeline all after the second are like the second."""
    micro_batches = layout.grad_accumulation_steps(config.train)
    return backward_starts(layout, micro_batches if layout.pp_enabled else min(2, micro_batches), pp_rank)


def estimate_memory(config: RunConfig, layout: Layout, widths: StateWidths, device: Device = "cpu") -> MemoryEstimate:
    """Return the memory of the rank with the highest peak.

    `device` is cpu or cuda: torch keeps different tensors on each. Model state is ZeRO's (arXiv 1910.02054, section 5).
    The peak is the worst moment of the step's backwards (at a loss, at a head, in a layer, in its attention, or at
    an end), or it is the optimizer's. A model whose activations are not known has a lower bound of it. Raises
    UserError if the global batch leaves a remainder.
    """
    if not model_profile(config.model).activations_are_known:
        return lower_bound_estimate(config, layout, widths, device)
    ranks = (
        estimate_rank_memory(config, layout, widths, device, pp_rank, stages=rank_stages(config.model, layout, pp_rank))
        for pp_rank in range(layout.pp)
    )
    highest = max(ranks, key=lambda memory: memory.peak_bytes)
    if device == "cpu":
        return highest
    return dataclasses.replace(highest, at_peak=highest.at_peak | {"workspaces": WORKSPACE_BYTES})


def prediction_columns(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> dict[str, int | None]:
    """Return the row's predicted columns; empty for a model whose activations are not known."""
    if not model_profile(config.model).activations_are_known:
        return {"predicted_peak_bytes": None, "predicted_activation_bytes": None}
    activations = (activation_bytes(config, layout, device, pp_rank) for pp_rank in range(layout.pp))
    memory = estimate_memory(config, layout, widths, device)
    return {"predicted_peak_bytes": memory.peak_bytes, "predicted_activation_bytes": max(activations)}


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
    buffers += max(0, transient_buffers(config, layout, widths, [stage], stage, device).forward - gradient_bytes)
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
    costs = stage_costs(config, layout, device, stages, widths)
    starts = rank_backward_starts(config, layout, pp_rank)
    total = sum(cost.parameter_count for cost in costs)
    parameter_bytes = -(-widths.parameters * total // layout.shard_count("parameters"))
    optimizer_bytes = widths.optimizer * optimizer_parameter_count(config.model, layout, stages)
    gradients = [-(-widths.gradients * cost.parameter_count // layout.shard_count("gradients")) for cost in costs]
    host_gradients = host_gradient_bytes(widths, layout, [cost.parameter_count for cost in costs])
    gradient_bytes = sum(gradients) + sum(host_gradients)
    resident = {"parameters": parameter_bytes, "optimizer": optimizer_bytes}
    host_bytes = 0
    if device == "cpu":  # the host's memory is the device's
        gradients = [sum(sizes) for sizes in zip(gradients, host_gradients, strict=True)]
    else:
        offloaded_state = [resident.pop(kind) for kind in layout.offloaded_state if kind in resident]
        host_bytes = sum(offloaded_state) + sum(host_gradients) + widths.host_buffer_bytes
        host_bytes += max_offloaded_bytes(costs, starts)
    # torch's stages receive every micro-batch of a step, and every gradient, into a buffer of its own.
    received = layout.grad_accumulation_steps(config.train) * sum(
        cost.input_bytes + cost.output_bytes for cost in costs
    )
    buffer_bytes = received + sum(buffer_tensors(config, layout, widths, stages).values())
    buffer_bytes += widths.host_buffer_bytes if device == "cpu" else 0
    keeps_gradients = keeps_grad_buffers(config, layout, widths)
    keeps_sent = layout.schedule != "1f1b"  # torch's other schedules wait for all sends at the end of the step
    if layout.uses_deepspeed_zero and layout.zero_stage == 2 and layout.offload == "none":
        gradients = [-(-widths.gradients * round(partition_elements(config, layout, stages)))]
    sums = summed_gradient_bytes(config, layout, widths, gradients)
    peaks = [
        peak for start in starts for peak in step_peaks(costs, gradients, sums, keeps_gradients, start, keeps_sent)
    ]
    copied = gradient_copy_bytes(config, layout, widths, total)
    temporaries = optimizer_temporary_bytes(config, layout, total) + copied * (layout.zero_stage == 3)
    for size in (temporaries, copied):
        peaks.append(dict.fromkeys(peaks[0], 0) | {"gradients": sum(gradients), "temporaries": size})
    if device == "cpu":
        peaks.append(dict.fromkeys(peaks[0], 0) | gloo_gather_peak(config, layout, widths, total))
    highest = max(peaks, key=lambda peak: sum(peak.values()))
    highest["buffers"] += buffer_bytes
    return MemoryEstimate(
        parameter_bytes,
        gradient_bytes,
        optimizer_bytes,
        activation_bytes=max_saved_bytes(costs, starts),
        loss_bytes=sum(sum(loss_tensors(cost.shape).values()) for cost in costs if cost.stage.holds_head),
        communication_buffer_bytes=buffer_bytes + max(cost.transient.largest for cost in costs),
        host_bytes=host_bytes,
        process_bytes=PROCESS_BYTES[device],
        at_peak=resident | highest,
    )


def activation_bytes(config: RunConfig, layout: Layout, device: Device, pp_rank: int) -> int:
    """Return the most that this rank of the pipeline keeps for backward, log-probabilities included."""
    costs = stage_costs(config, layout, device, rank_stages(config.model, layout, pp_rank))
    return max_saved_bytes(costs, rank_backward_starts(config, layout, pp_rank))


def offloaded_activation_bytes(config: RunConfig, layout: Layout, device: Device, pp_rank: int) -> int:
    """Return the most that activation offload keeps on the host for this rank of the pipeline; 0 without it."""
    costs = stage_costs(config, layout, device, rank_stages(config.model, layout, pp_rank))
    return max_offloaded_bytes(costs, rank_backward_starts(config, layout, pp_rank))


def max_offloaded_bytes(costs: Sequence[StageCost], starts: Sequence[BackwardStart]) -> int:
    """Return the most bytes of activations that are on the host at once."""
    return max(
        sum(
            (pending + awaiting) * cost.offloaded_bytes
            for cost, pending, awaiting in zip(costs, start.pending, start.awaiting_weight_grad, strict=True)
        )
        for start in starts
    )


def max_saved_bytes(costs: Sequence[StageCost], starts: Sequence[BackwardStart]) -> int:
    """Return the most bytes of activations and log-probabilities that are kept for backward at once."""
    highest = 0
    for start in starts:
        passes = zip(costs, start.pending, start.awaiting_weight_grad, strict=True)
        saved = sum(
            (pending + awaiting) * cost.activations.before_backward + pending * cost.log_probability_bytes
            for cost, pending, awaiting in passes
        )
        own = costs[start.stage]
        change = {
            "backward": max(
                own.activations.layers[0].most - own.activations.before_backward - own.log_probability_bytes,
                own.recomputed_log_probability_bytes,
            ),
            "inputs": own.activations.recomputed,  # nothing is freed
            "weights": max(own.weight_pass_activations) - own.activations.before_backward,
        }[start.kind]
        highest = max(highest, saved, saved + change)
    return highest
