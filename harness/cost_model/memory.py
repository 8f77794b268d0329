"""One rank's memory, predicted from configuration, layout and the widths its engine allocates. Imports no torch.

Left out: the padding of shards, the allocator's fragmentation, what a collective needs beside its result. What tensor
and pipeline parallelism keep was checked on CPU; for CUDA it is derived.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.schema import ModelConfig, RunConfig
from harness.cost_model.activations import WIDTH_BYTES, loss_tensors
from harness.cost_model.buffers import buffer_tensors, keeps_grad_buffers, unsharded_grad_bytes
from harness.cost_model.pipeline import BackwardStart, backward_starts
from harness.cost_model.stage_activations import host_gradient_bytes
from harness.cost_model.stage_memory import Bytes, StageCost, held_parameter_count, stage_costs, step_peaks
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_numel, split_into_stages, whole_model
from harness.layout.state_widths import StateWidths

# Outside torch's allocator. cpu: resident size of a rank after three steps of DeepSpeed ZeRO-3 on a 66 kB model
# (psutil's rss, torch 2.13, DeepSpeed 0.19.8: 0.399e9; plain torch 0.343e9). cuda: a context and its libraries'
# workspaces, as commonly reported, not measured here.
PROCESS_BYTES = {"cpu": 400_000_000, "cuda": 500_000_000}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank. Each part at its own most; `at_peak` holds what fills the peak at one moment."""

    parameter_bytes: int  # at rest between steps
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # held for backward at most, log-probabilities included
    loss_bytes: int  # logits and cross-entropy
    communication_buffer_bytes: int
    host_bytes: int  # kept on the host by offload, pinned; 0 on a CPU, where it is among all else
    process_bytes: int  # interpreter, libraries, context: never in torch's allocator; only for whether a host is enough
    at_peak: Bytes

    @property
    def peak_bytes(self) -> int:
        """What torch's allocator holds at the worst moment of a step."""
        return sum(self.at_peak.values())


def all_stages(model: ModelConfig, layout: Layout) -> list[Stage]:
    """The model's stages in order; without a pipeline it is one."""
    return split_into_stages(model, layout) if layout.pp > 1 else [whole_model(model)]


def rank_moments(config: RunConfig, layout: Layout, place: int) -> list[BackwardStart]:
    """The backwards of a rank's step; without a pipeline all after the second are like it."""
    micro_batches = layout.grad_accumulation_steps(config.train)
    return backward_starts(layout, micro_batches if layout.pp > 1 else min(2, micro_batches), place)


def estimate(config: RunConfig, layout: Layout, widths: StateWidths, device: str = "cpu") -> MemoryEstimate:
    """The memory of the fullest rank. device is cpu or cuda: torch keeps different tensors on each.

    Model state is ZeRO's (arXiv 1910.02054, section 5). The peak is the fullest moment of the step's backwards: that
    of a loss, of a head, of a last layer, of its attention, or an end; or it is the optimizer's. Of a model from
    outside it is what is known. Raises UserError if the global batch leaves a remainder.
    """
    if config.model.asked is not None:
        return lower_bound_estimate(config, layout, widths, device)
    model_stages = all_stages(config.model, layout)
    ranks = (
        estimate_at(config, layout, widths, device, place, model_stages[place :: layout.pp])
        for place in range(layout.pp)
    )
    return max(ranks, key=lambda found: found.peak_bytes)


def predicted(config: RunConfig, layout: Layout, widths: StateWidths, device: str) -> dict[str, int | None]:
    """The columns of the row; empty for a model from outside, whose activations are not known."""
    if config.model.asked is not None:
        return {"predicted_peak_bytes": None, "predicted_activation_bytes": None}
    activations = (activation_bytes(config, layout, device, place) for place in range(layout.pp))
    found = estimate(config, layout, widths, device)
    return {"predicted_peak_bytes": found.peak_bytes, "predicted_activation_bytes": max(activations)}


def lower_bound_estimate(config: RunConfig, layout: Layout, widths: StateWidths, device: str) -> MemoryEstimate:
    """What is known of a model from outside: its state and buffers, and so the least that its peak can be."""
    total = held_parameter_count(config.model, whole_model(config.model), layout.tp, layout.vocabulary_tp)
    parameter_bytes, gradient_bytes, optimizer_bytes = (
        -(-getattr(widths, kind) * total // layout.shard_count(kind))
        for kind in ("parameters", "gradients", "optimizer")
    )
    buffers = sum(buffer_tensors(config, layout, widths, [whole_model(config.model)]).values())
    (moved,) = host_gradient_bytes(widths, layout, [total])
    gradient_bytes += moved
    at_peak = {"parameters": parameter_bytes, "optimizer": optimizer_bytes, "gradients": gradient_bytes}
    away = 0 if device == "cpu" else sum(at_peak.pop(kind) for kind in layout.offloaded_state)
    at_peak["buffers"] = buffers
    return MemoryEstimate(
        parameter_bytes, gradient_bytes, optimizer_bytes, 0, 0, buffers, away, PROCESS_BYTES[device], at_peak
    )


def estimate_at(
    config: RunConfig, layout: Layout, widths: StateWidths, device: str, place: int, held: Sequence[Stage]
) -> MemoryEstimate:
    """The memory of a rank at this place of the pipeline, which holds these stages."""
    parts, backwards = stage_costs(config, layout, device, held), rank_moments(config, layout, place)
    total = sum(part.parameters for part in parts)
    parameter_bytes = -(-widths.parameters * total // layout.shard_count("parameters"))
    optimizer_bytes = widths.optimizer * optimizer_share(config.model, layout, held)
    gradients = [-(-widths.gradients * part.parameters // layout.shard_count("gradients")) for part in parts]
    moved = host_gradient_bytes(widths, layout, [part.parameters for part in parts])
    gradient_bytes = sum(gradients) + sum(moved)
    resident = {"parameters": parameter_bytes, "optimizer": optimizer_bytes}
    host_bytes = 0
    if device == "cpu":  # the host's memory is the device's
        gradients = [own + other for own, other in zip(gradients, moved, strict=True)]
    else:
        away = [resident.pop(kind) for kind in layout.offloaded_state if kind in resident]
        host_bytes = sum(away) + sum(moved) + widths.host_buffer_bytes + offloaded_activation_bytes(parts, backwards)
    # torch's stages receive every micro-batch of a step, and every gradient, into a buffer of its own.
    received = layout.grad_accumulation_steps(config.train) * sum(part.arriving + part.leaving for part in parts)
    buffer_bytes = received + sum(buffer_tensors(config, layout, widths, held).values())
    buffer_bytes += widths.host_buffer_bytes if device == "cpu" else 0
    standing = keeps_grad_buffers(config, layout)
    piles_up = layout.schedule != "1f1b"  # the other schedules of torch wait for what they sent at the end of the step
    fills = [fill for moment in backwards for fill in step_peaks(parts, gradients, standing, moment, piles_up)]
    fills.append(
        dict.fromkeys(fills[0], 0) | {"gradients": sum(gradients), "temporaries": update_bytes(config, layout, total)}
    )
    fullest = max(fills, key=lambda fill: sum(fill.values()))
    fullest["buffers"] += buffer_bytes
    return MemoryEstimate(
        parameter_bytes,
        gradient_bytes,
        optimizer_bytes,
        held_for_backward(parts, backwards),
        sum(sum(loss_tensors(part.one).values()) for part in parts if part.stage.holds_head),
        buffer_bytes + max(unsharded_grad_bytes(config, layout, [stage]) for stage in held),
        host_bytes,
        PROCESS_BYTES[device],
        resident | fullest,
    )


def optimizer_share(model: ModelConfig, layout: Layout, held: Sequence[Stage]) -> int:
    """Parameters of which the fullest rank holds optimizer state."""
    shards = layout.shard_count("optimizer")
    sizes = [size for stage in held for size in local_numel(model, layout, stage).values()]
    if not layout.partitions_by_parameter:
        return math.ceil(sum(sizes) / shards)
    ranks = [0.0] * shards
    for size in sorted(sizes, reverse=True):  # as ZeroRedundancyOptimizer deals them out
        ranks[ranks.index(min(ranks))] += size
    return math.ceil(max(ranks))


def update_bytes(config: RunConfig, layout: Layout, parameters: int) -> int:
    """Temporaries of the optimizer: torch's foreach AdamW makes the roots of all second moments at once, fused none."""
    width = WIDTH_BYTES[config.precision.master]
    return 0 if config.train.fused_optimizer else -(-width * parameters // layout.shard_count("optimizer"))


def activation_bytes(config: RunConfig, layout: Layout, device: str, place: int) -> int:
    """The most that a rank at this place of the pipeline holds for backward, log-probabilities included."""
    held = all_stages(config.model, layout)[place :: layout.pp]
    return held_for_backward(stage_costs(config, layout, device, held), rank_moments(config, layout, place))


def moved_activation_bytes(config: RunConfig, layout: Layout, device: str, place: int) -> int:
    """The most that activation offload holds on the host for a rank at this place of the pipeline; 0 without it."""
    held = all_stages(config.model, layout)[place :: layout.pp]
    return offloaded_activation_bytes(stage_costs(config, layout, device, held), rank_moments(config, layout, place))


def offloaded_activation_bytes(parts: Sequence[StageCost], backwards: Sequence[BackwardStart]) -> int:
    """The most of activations that lie on the host at once."""
    passes = (zip(parts, moment.waiting, moment.halved, strict=True) for moment in backwards)
    return max(sum((waiting + halved) * part.offloaded for part, waiting, halved in one) for one in passes)


def held_for_backward(parts: Sequence[StageCost], backwards: Sequence[BackwardStart]) -> int:
    """The most of activations and log-probabilities at once."""
    most = 0
    for moment in backwards:
        passes = zip(parts, moment.waiting, moment.halved, strict=True)
        there = sum((w + h) * part.kept.before_backward + w * part.log_probabilities for part, w, h in passes)
        own = parts[moment.own]
        change = {
            "backward": max(
                max(own.kept.in_last_block, own.kept.in_last_core) - own.kept.before_backward - own.log_probabilities,
                own.remade_log_probabilities,
            ),
            "inputs": own.kept.second_forward,  # and all else stays
            "weights": max(own.kept_for_weights) - own.kept.before_backward,
        }[moment.kind]
        most = max(most, there, there + change)
    return most
