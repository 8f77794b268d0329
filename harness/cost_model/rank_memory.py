"""The memory of one rank of a pipeline, and which rank's peak is the highest. Imports no torch.

Ranks whose stages are alike differ by the order of their passes alone, so that one rank's costs serve all of them.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.buffers import buffer_tensors, gradients_at_start, keeps_grad_buffers, rebuilds_buckets
from harness.cost_model.deepspeed_memory import (
    gloo_gather_peak,
    gradient_copy_bytes,
    kept_host_gradient_bytes,
    norm_peak,
    offloaded_reduction_bytes,
    stage_2_gradient_bytes,
    summed_gradient_bytes,
    widening_peak,
)
from harness.cost_model.pipeline import BackwardStart, backward_starts, heaviest_starts
from harness.cost_model.stage_activations import host_gradient_bytes
from harness.cost_model.stage_memory import Bytes, StageCost, stage_costs
from harness.cost_model.step_peaks import PARTS, highest_step_peak
from harness.cost_model.transient_buffers import shard_groups, without_data_parallelism
from harness.layout.layout import Layout
from harness.layout.partition import (
    Stage,
    local_sizes,
    representative_stage,
    split_into_stages,
    split_model,
    whole_model,
)
from harness.layout.state_widths import StateWidths


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


@dataclass(frozen=True)
class RankCost:
    """The bytes of a pipeline's rank that do not depend on the order of its passes."""

    config: RunConfig
    layout: Layout
    widths: StateWidths
    device: Device
    stages: tuple[Stage, ...]
    costs: list[StageCost]
    resident: Bytes  # parameters and optimizer state on the device
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    offloaded_state_bytes: int
    gradients: list[int]  # the most bytes of each stage's gradients on the device
    sums: list[int]  # those that are kept from one micro-batch to the next
    gradients_at_start: list[int]  # those that exist when a step begins
    buffer_bytes: int
    host_gradient_bytes: int  # that a CPU, where the host is the device, has all the time
    other_peaks: list[Bytes]  # at the moments of a step outside backward, without resident state and buffers

    def step_peak(self, starts: Sequence[BackwardStart]) -> Bytes:
        """Return the bytes at the worst moment of a step with these starts of backwards, without resident state."""
        keeps_sent = self.layout.schedule != "1f1b"  # torch's other schedules wait for all sends at the end of the step
        micro_batches = self.layout.grad_accumulation_steps(self.config.train)
        backward = highest_step_peak(
            self.costs, self.gradients, self.sums, self.gradients_at_start, starts, keeps_sent, micro_batches
        )
        peaks = (backward, *self.other_peaks)
        highest = max(peaks, key=lambda peak: sum(peak.values()))
        gradients = highest["gradients"] + self.host_gradient_bytes
        return highest | {"gradients": gradients, "buffers": highest["buffers"] + self.buffer_bytes}

    def heaviest_starts(self, pp_ranks: tuple[int, ...]) -> dict[int, Sequence[BackwardStart]]:
        """Return the starts of backwards among which the worst one of these ranks is, which have the same stages."""
        micro_batches = self.layout.grad_accumulation_steps(self.config.train)
        if self.layout.pp_enabled and all(cost.waiting_exceeds_sent_back for cost in self.costs):
            return heaviest_starts(self.layout, micro_batches, pp_ranks)
        return {rank: rank_backward_starts(self.config, self.layout, rank) for rank in pp_ranks}


def rank_cost(
    config: RunConfig, layout: Layout, widths: StateWidths, device: Device, stages: tuple[Stage, ...]
) -> RankCost:
    """Return the bytes of a rank of the pipeline that has these stages; device is cpu or cuda.

    On a CPU that includes the copies that gloo makes of what it gathers and reduces. NCCL makes none.
    """
    costs = stage_costs(config, layout, device, stages, widths)
    is_padded = layout.data_parallel == "fsdp"
    counts = [shard_groups(config.model, layout, c.stage).padded if is_padded else c.parameter_count for c in costs]
    total = sum(counts)
    parameter_bytes = -(-widths.parameters * total // layout.shard_count("parameters"))
    shards = layout.shard_count("optimizer")
    optimizer_count = -(-total // shards) if is_padded else optimizer_parameter_count(config.model, layout, stages)
    optimizer_bytes = widths.optimizer * optimizer_count
    gradients = [-(-widths.gradients * count // layout.shard_count("gradients")) for count in counts]
    host_gradients = host_gradient_bytes(widths, layout, counts)
    gradient_bytes = sum(gradients) + sum(host_gradients)
    resident = {"parameters": parameter_bytes, "optimizer": optimizer_bytes}
    offloaded_state_bytes = 0
    kept_gradients = 0
    if device == "cpu" and not layout.uses_deepspeed_zero:  # the host's memory is the device's
        gradients = [sum(sizes) for sizes in zip(gradients, host_gradients, strict=True)]
    elif device == "cpu":
        kept_gradients = kept_host_gradient_bytes(config, layout, widths, stages, sum(host_gradients))
    else:
        offloaded_state = [resident.pop(kind) for kind in layout.offloaded_state if kind in resident]
        offloaded_state_bytes = sum(offloaded_state) + sum(host_gradients) + widths.host_buffer_bytes
    sums = summed_gradient_bytes(config, layout, widths, gradients)
    # torch's stages receive every micro-batch of a step, and every gradient, into a buffer of its own.
    received = layout.grad_accumulation_steps(config.train) * sum(
        cost.input_bytes + cost.output_bytes for cost in costs
    )
    buffer_bytes = received + sum(buffer_tensors(config, layout, widths, stages).values())
    buffer_bytes += widths.host_buffer_bytes if device == "cpu" else 0
    if layout.uses_deepspeed_zero and layout.zero_stage == 2 and layout.offload == "none":
        in_backward, between = stage_2_gradient_bytes(config, layout, widths, stages, device)
        gradients, sums = [in_backward], [between]
    freed_buckets = widths.buffer_bytes if layout.uses_deepspeed_zero and layout.zero_stage == 1 else 0
    copied = gradient_copy_bytes(config, layout, widths, total, device)
    temporaries = copied if layout.zero_stage == 3 else 0
    if not config.train.fused_optimizer:
        width = config.optimizer.foreach_copies * config.precision.master_bytes
        temporaries += -(-width * total // shards)
    nothing = dict.fromkeys(PARTS, 0)
    others = [nothing | {"gradients": sum(gradients), "temporaries": temporaries}]
    others.append(nothing | {"gradients": sum(gradients), "temporaries": copied, "buffers": -freed_buckets})
    others.append(nothing | {"gradients": sum(gradients)} | widening_peak(config, layout, widths, stages))
    if device == "cuda":
        others.append(nothing | norm_peak(config, layout, widths, stages, sum(sums)))
        in_reduction = offloaded_reduction_bytes(config, layout, widths, stages)
        others.append(nothing | {"gradients": sum(gradients), "temporaries": in_reduction})
    if device == "cpu":
        others.append(nothing | gloo_gather_peak(config, layout, widths, total))
    if rebuilds_buckets_beside_gradients(config, layout):
        in_buckets = sum(gradients) * keeps_grad_buffers(config, layout, widths)
        rebuilt = in_buckets + buffer_tensors(config, layout, widths, stages).get("ddp_buckets", 0)
        others.append(nothing | {"gradients": in_buckets, "temporaries": rebuilt})
    return RankCost(
        config,
        layout,
        widths,
        device,
        stages,
        costs,
        resident,
        parameter_bytes,
        gradient_bytes,
        optimizer_bytes,
        offloaded_state_bytes,
        gradients,
        sums=sums,
        gradients_at_start=gradients_at_start(config, layout, widths, sums, device),
        buffer_bytes=buffer_bytes,
        host_gradient_bytes=kept_gradients,
        other_peaks=others,
    )


def optimizer_parameter_count(model: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> int:
    """Return the number of parameters whose optimizer state is on the rank that has most of them."""
    shards = layout.shard_count("optimizer")
    if layout.partitions_by_parameter:
        return _largest_partition(model, without_data_parallelism(layout), tuple(stages), shards)
    return math.ceil(_local_total(model, without_data_parallelism(layout), tuple(stages)) / shards)


@lru_cache(maxsize=1024)
def _local_total(model: ModelConfig, layout: Layout, stages: tuple[Stage, ...]) -> float:
    return sum(local_sizes(model, layout, stages))


@lru_cache(maxsize=256)
def _largest_partition(model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int) -> int:
    """Return the parameters of the fullest rank, as ZeroRedundancyOptimizer assigns them: the largest one first.

    Each goes to the rank that has fewest, and to the first of several such ranks.
    """
    sizes = local_sizes(model, layout, stages)
    ranks = [(0.0, rank) for rank in range(shards)]
    for size in sorted(sizes, reverse=True):
        total, rank = ranks[0]
        heapq.heapreplace(ranks, (total + size, rank))
    return math.ceil(max(ranks)[0])


@dataclass(frozen=True)
class RankPeak:
    """A rank of the pipeline with the starts of its step's backwards among which the worst one is."""

    cost: RankCost
    pp_rank: int
    starts: Sequence[BackwardStart]

    @cached_property
    def at_peak(self) -> Bytes:
        """The bytes at the worst moment of a step, by what they are."""
        return self.cost.resident | self.cost.step_peak(self.starts)

    @cached_property
    def peak_bytes(self) -> int:
        """The bytes at the worst moment of a step."""
        return sum(self.at_peak.values())


def rebuilds_buckets_beside_gradients(config: RunConfig, layout: Layout) -> bool:
    """Return whether DDP allocates its buckets anew in a timed step, while gradients lie in the old ones.

    These are the gradients of an earlier micro-batch, if there is one.
    """
    return rebuilds_buckets(config, layout) and layout.grad_accumulation_steps(config.train) > 1


def highest_rank(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> RankPeak:
    """Return the first of the pipeline's ranks whose peak is highest."""
    ranks = []
    for stages, pp_ranks in alike_ranks(config.model, layout, config.checkpointing.every):
        cost = rank_cost(config, layout, widths, device, stages)
        ranks += [RankPeak(cost, rank, starts) for rank, starts in cost.heaviest_starts(pp_ranks).items()]
    highest = max(ranks, key=lambda rank: (rank.peak_bytes, -rank.pp_rank))
    # What is most at other moments than the peak's is among all starts of that rank.
    (starts,) = highest.cost.heaviest_starts((highest.pp_rank,)).values()
    return RankPeak(highest.cost, highest.pp_rank, starts)


def alike_ranks(model: ModelConfig, layout: Layout, period: int) -> Sequence[tuple[tuple[Stage, ...], tuple[int, ...]]]:
    """Return the pipeline's ranks by what their stages are, with stages that stand for them.

    `period` is the n of checkpointing every n-th layer. Raises UserError if the model cannot be cut so.
    """
    return _alike_ranks(model, layout.pp, layout.virtual_stages, layout.layers_per_stage, period)


@lru_cache(maxsize=1024)
def _alike_ranks(
    model: ModelConfig, pp: int, virtual_stages: int, layers: tuple[int, ...] | None, period: int
) -> tuple[tuple[tuple[Stage, ...], tuple[int, ...]], ...]:
    stages = split_model(model, pp, virtual_stages, layers) if pp > 1 else [whole_model(model)]
    alike: dict[tuple[Stage, ...], list[int]] = {}
    for pp_rank in range(pp):
        own = tuple(representative_stage(stage, period) for stage in stages[pp_rank::pp])
        alike.setdefault(own, []).append(pp_rank)
    return tuple((own, tuple(ranks)) for own, ranks in alike.items())


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
        last = own.activations.layers[0]
        change = {
            "backward": max(
                last.outside + last.own.most_saved - own.activations.before_backward - own.log_probability_bytes,
                own.recomputed_log_probability_bytes,
            ),
            "inputs": own.activations.recomputed,  # nothing is freed
            "weights": max(own.weight_pass_activations) - own.activations.before_backward,
        }[start.kind]
        highest = max(highest, saved, saved + change)
    return highest
