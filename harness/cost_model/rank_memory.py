"""The memory of one rank of a pipeline, and which rank's peak is the highest. Imports no torch.

Ranks whose stages are alike differ by the order of their passes alone, so that one rank's tapes serve all of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import add, mul

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.data_parallel_buckets import DistributedDataParallel
from harness.cost_model.deepspeed_buckets import ZeroStage2
from harness.cost_model.deepspeed_stage_3 import ZeroStage3
from harness.cost_model.deepspeed_zero import ZeroStage1, rank_partitions
from harness.cost_model.fully_shard import FullyShard
from harness.cost_model.pipeline import BackwardStart, backward_starts
from harness.cost_model.pipelined_fully_shard import PipelinedFullyShard
from harness.cost_model.sharding import Pass, Sharding
from harness.cost_model.step import play_pass
from harness.cost_model.tape import Bytes, Moment, Tape
from harness.layout.layout import Layout
from harness.layout.partition import Stage, representative_stage, split_into_stages
from harness.layout.state_widths import StateWidths

# The ways of sharding by a layout's data parallelism, and DeepSpeed's by its stage.
POLICIES: dict[str | int, type[Sharding]] = {
    "ddp": DistributedDataParallel,
    "fsdp": FullyShard,
    1: ZeroStage1,
    2: ZeroStage2,
    3: ZeroStage3,
}


def sharding_of(
    config: RunConfig, layout: Layout, widths: StateWidths, device: Device, stages: Sequence[Stage]
) -> Sharding:
    """Return the way in which a rank with these stages shards its state."""
    kind = layout.zero_stage if layout.uses_deepspeed_zero else layout.data_parallel
    policy = PipelinedFullyShard if widths.reduces_at_end else POLICIES.get(kind, Sharding)
    return policy(config, layout, widths, device, stages)


@dataclass(frozen=True, eq=False)
class RankStep:
    """The step of a pipeline's rank; what does not depend on the order of its passes is worked out once."""

    sharding: Sharding
    pp_ranks: tuple[int, ...] = (0,)  # for which it stands
    tapes: dict[tuple[object, ...], Pass] = field(default_factory=dict)  # of passes so far, by what decides them

    @cached_property
    def state(self) -> Bytes:
        """The bytes of parameters and optimizer state on the device."""
        own, away = self.sharding, () if self.sharding.is_cpu else self.sharding.layout.offloaded_state
        state = {"parameters": own.parameter_bytes, "optimizer": own.optimizer_bytes}
        return {kind: size for kind, size in state.items() if kind not in away}

    @property
    def lasting_bytes(self) -> int:
        """The bytes that the device has at all moments of a step."""
        return sum(self.state.values()) + self.sharding.buffer_bytes + self.sharding.host_gradient_bytes

    @cached_property
    def outside(self) -> Moment:
        """The worst moment of a step outside of passes, without state and lasting buffers."""
        tape = Tape()
        tape.phase = "optimizer"
        self.sharding.step(tape)
        return tape.highest

    def play(self, start: BackwardStart) -> tuple[Pass, Bytes]:
        """Return the tape of the pass that begins its backward so, and what the rank keeps of other passes then."""
        own, index = self.sharding, start.stage
        gradients = [own.gradients_after(number, backwards) for number, backwards in enumerate(start.done)]
        place = (start.done[index] == 0, start.forwards[index] == 1, start.is_last)
        key = (index, start.kind, own.gradients[index] - gradients[index], *place)
        if key not in self.tapes:
            self.tapes[key] = Pass(
                own.activations[index], own.groups[index], own.trained[index], start.kind, *place, key[2]
            )
            play_pass(own, self.tapes[key])
        return self.tapes[key], {"gradients": sum(gradients)} | self.kept_of_others(start)

    def kept_of_others(self, start: BackwardStart) -> Bytes:
        """Return what the rank keeps of other passes when a backward starts.

        torch's schedules but 1F1B wait for all sends at the end of the step. A finished send of gloo refers to what it
        has sent, and one of NCCL does not.
        """
        own = self.sharding
        others = Counter[str]()
        for index, stage in enumerate(own.activations):
            pending, awaiting = start.pending[index], start.awaiting_weight_grad[index]
            sent, sent_back = start.forwards[index], awaiting + start.done[index]
            if own.layout.schedule == "1f1b":
                sent, sent_back = pending + (start.holds_sent and own.is_cpu), min(1, sent_back)
            if index == start.stage:  # the pass itself has a tape
                pending, awaiting = (pending, awaiting - 1) if start.kind == "weights" else (pending - 1, awaiting)
            elif start.done[index] < own.micro_batches:
                others["buffers"] += own.kept_bytes(index, start.forwards[index] > 0, start.done[index] > 0)
            passes, together = pending + awaiting, stage.stage.local_neighbor
            sent, sent_back = sent * (together <= 0), sent_back * (together >= 0)  # as buffers of the stage beside it
            others.update(
                activations=passes * stage.before_backward,
                buffers=sent * stage.output_bytes + sent_back * stage.input_bytes - passes * stage.received_input_bytes,
                loss=pending * stage.log_probability_bytes,
                temporaries=awaiting * stage.deferred_grad_bytes,
            )
        return others

    def starts(self, pp_rank: int) -> list[BackwardStart]:
        """Return the backwards of a rank's step; without a pipeline all between the first and the last are alike."""
        own = self.sharding
        micro_batches = own.micro_batches if own.layout.pp_enabled else min(3, own.micro_batches)
        return backward_starts(own.layout, micro_batches, pp_rank)

    def peak(self, pp_rank: int) -> Moment:
        """Return the worst moment of the step of this rank, with its bytes by what they are."""
        own = self.sharding
        moments = [(self.outside, Bytes())]
        for start in own.counted_starts(self.starts(pp_rank)):
            tape, others = self.play(start)
            moments.append((tape.highest, others))
        highest, others = max(moments, key=lambda moment: moment[0].total + sum(moment[1].values()))
        lasting = {"gradients": own.host_gradient_bytes, "buffers": own.buffer_bytes}
        at_peak = self.state | {
            part: size + others.get(part, 0) + lasting.get(part, 0) for part, size in highest.parts.items()
        }
        return Moment(sum(at_peak.values()), highest.phase, at_peak)

    def most_saved(self, pp_rank: int) -> int:
        """Return the most bytes of activations and log-probabilities that are kept for backward at once."""
        passes = map(self.play, self.starts(pp_rank))
        return max((tape.most_saved + others["activations"] + others["loss"] for tape, others in passes), default=0)

    def most_offloaded(self, pp_rank: int) -> int:
        """Return the most bytes of activations that are on the host at once."""
        sizes = [stage.offloaded_bytes for stage in self.sharding.activations]
        pending = (map(add, start.pending, start.awaiting_weight_grad) for start in self.starts(pp_rank))
        return max((sum(map(mul, sizes, passes)) for passes in pending), default=0)


def rank_steps(config: RunConfig, layout: Layout, widths: StateWidths, device: Device) -> list[RankStep]:
    """Return the steps of the pipeline's ranks, one for all whose stages are alike."""
    alike = alike_ranks(config.model, layout, config.checkpointing.every)
    return [RankStep(sharding_of(config, layout, widths, device, stages), ranks) for stages, ranks in alike]


def highest_rank(steps: Sequence[RankStep]) -> tuple[RankStep, int]:
    """Return the first of the ranks of these steps whose peak is highest, with its step."""
    ranks = [(step, pp_rank) for step in steps for pp_rank in step.pp_ranks]
    return max(ranks, key=lambda rank: (rank[0].peak(rank[1]).total, -rank[1]))


def fullest_rank(config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage]) -> int:
    """Return a rank that no other one exceeds where DeepSpeed divides all parameters as one tensor: stages 1 and 2.

    Under offload stage 2 allocates the partition of the last ranks first. Stage 1 reduces all gradients after backward,
    of which the first rank has the first.
    """
    if layout.offload != "none":
        return (layout.world_size - layout.tp) * (layout.zero_stage == 2)
    peaks = dict[int, int]()
    for partition in rank_partitions(config.model, layout, stages):
        own = sharding_of(config, layout, widths, "cuda", stages)
        own.ranks = [partition]  # type: ignore[attr-defined]
        peaks[partition.rank] = RankStep(own).peak(0).total
    return max(peaks, key=lambda rank: (peaks[rank], rank)) * layout.tp


def alike_ranks(model: ModelConfig, layout: Layout, period: int) -> Sequence[tuple[tuple[Stage, ...], tuple[int, ...]]]:
    """Return the pipeline's ranks by what their stages are, with stages that stand for them.

    `period` is the n of checkpointing every n-th layer. Raises UserError if the model cannot be cut so.
    """
    ranks = tuple(map(layout.stage_indices, range(layout.pp)))
    return group_ranks(tuple(split_into_stages(model, layout)), ranks, period)


@lru_cache(maxsize=1024)
def group_ranks(
    stages: tuple[Stage, ...], ranks: tuple[tuple[int, ...], ...], period: int
) -> tuple[tuple[tuple[Stage, ...], tuple[int, ...]], ...]:
    """Return the ranks of a pipeline, each of which has some of these stages, by what their own are."""
    alike: dict[tuple[Stage, ...], list[int]] = {}
    for pp_rank, indices in enumerate(ranks):
        own = tuple(representative_stage(stages[index], period) for index in indices)
        alike.setdefault(own, []).append(pp_rank)
    return tuple((own, tuple(ranks)) for own, ranks in alike.items())
