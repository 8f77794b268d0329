"""The arrangement of ranks, and how they divide model state and batch."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.config.from_dict import Positive, divisors_text
from harness.config.schema import TrainConfig
from harness.config.strategy import (
    AXES,
    DATA_AXES,
    DEGREES,
    MODEL_AXES,
    V_SCHEDULES,
    DataParallel,
    Offload,
    Schedule,
    StrategyConfig,
)
from harness.util.text import UserError


@dataclass(frozen=True)
class Layout:
    """A strategy resolved against a world: every degree is known, and their product is the number of ranks."""

    engine: str
    data_parallel: DataParallel
    zero_stage: int
    dp_replicate: Positive
    dp_shard: Positive
    tp: Positive
    sequence_parallel: bool
    cp: Positive
    pp: Positive
    schedule: Schedule
    virtual_stages: Positive
    layers_per_stage: tuple[int, ...] | None
    offload: Offload
    vocabulary_parallel: bool = True
    ep: Positive = 1
    secondary_shards: Positive = 1
    context_parallel: str = "gather"

    @property
    def dp(self) -> int:
        """The data-parallel degree: the number of parts that the global batch is split into."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_enabled(self) -> bool:
        """Whether several ranks, or groups of ranks, train on different data."""
        return self.dp > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether tensor-parallel ranks divide the matrices."""
        return self.tp > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether context-parallel ranks divide every sequence."""
        return self.cp > 1

    @property
    def exchanges_heads(self) -> bool:
        """Whether context-parallel ranks compute whole sequences of a part of the heads (Ulysses)."""
        return self.cp_enabled and self.context_parallel == "ulysses"

    @property
    def gathers_keys(self) -> bool:
        """Whether context-parallel ranks gather all keys and values for attention of their own positions."""
        return self.cp_enabled and self.context_parallel == "gather"

    @property
    def sequence_parts(self) -> int:
        """The number of equal parts into which context parallelism cuts a sequence."""
        return 2 * self.cp if self.gathers_keys else self.cp

    @property
    def ep_enabled(self) -> bool:
        """Whether data-parallel ranks divide the experts."""
        return self.ep > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether pipeline-parallel ranks divide the depth."""
        return self.pp > 1

    @property
    def splits_backward(self) -> bool:
        """Whether backwards, or some of them, run in two halves: for inputs and for weights (arXiv 2401.10241)."""
        return self.pp_enabled and self.schedule in ("zero_bubble", *V_SCHEDULES)

    @property
    def is_v_shaped(self) -> bool:
        """Whether the last rank of the pipeline has the two stages in the middle, and the first one both ends."""
        return self.pp_enabled and self.schedule in V_SCHEDULES and self.virtual_stages == 2

    @property
    def reshard_after_forward(self) -> bool | int:
        """What fully_shard calls by this name: whether parameters are divided again, or over how many ranks."""
        return self.secondary_shards if self.secondary_shards > 1 else self.zero_stage == 3

    @property
    def vocabulary_tp(self) -> int:
        """The number of parts into which tensor parallelism cuts embedding and head."""
        return self.tp if self.vocabulary_parallel else 1

    @property
    def num_stages(self) -> int:
        """The number of stages that the model's depth is cut into."""
        return self.pp * self.virtual_stages

    def stage_indices(self, pp_rank: int) -> tuple[int, ...]:
        """Return which stages this rank of the pipeline has: every pp-th one, or two that are as far from the ends."""
        if self.is_v_shaped:
            return pp_rank, self.num_stages - 1 - pp_rank
        return tuple(range(pp_rank, self.num_stages, self.pp))

    def pp_rank_of(self, stage_index: int) -> int:
        """Return which rank of the pipeline has this stage."""
        return next(pp_rank for pp_rank in range(self.pp) if stage_index in self.stage_indices(pp_rank))

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """The number of ranks along every mesh axis, outermost first; those along ep are no part of their degree's."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return sizes | {self.ep_degree: sizes[self.ep_degree] // self.ep}

    @property
    def ep_degree(self) -> str:
        """The data-parallel degree that expert-parallel ranks are part of."""
        return "dp_shard" if self.dp_shard > 1 else "dp_replicate"

    @cached_property
    def of_experts(self) -> "Layout":
        """The layout of the ranks that have the same experts: data parallelism divides these as it says."""
        sizes = self.axis_sizes
        return dataclasses.replace(self, ep=1, dp_replicate=sizes["dp_replicate"], dp_shard=sizes["dp_shard"])

    @cached_property
    def mesh_shape(self) -> tuple[int, ...]:
        """The sizes of the mesh axes, in the order of AXES."""
        return tuple(self.axis_sizes.values())

    @cached_property
    def model_axes(self) -> frozenset[str]:
        """The axes along which several ranks divide the model's work on a sequence."""
        return frozenset(axis for axis in MODEL_AXES if self.axis_sizes[axis] > 1)

    @cached_property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh_shape)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinate on every mesh axis."""
        coordinates: dict[str, int] = {}
        for axis, size in reversed(self.axis_sizes.items()):
            rank, coordinates[axis] = divmod(rank, size)
        return coordinates

    def data_rank(self, rank: int) -> int:
        """Return which part of the global batch the rank trains on, from 0 to dp - 1."""
        return self._index_along(rank, ("dp_replicate", "dp_shard", "ep"))

    def shard_index(self, rank: int) -> int:
        """Return which of the data-parallel shards of a state the rank holds, from 0 on."""
        return self._index_along(rank, self.sharding_axes)

    def expert_shard_index(self, rank: int) -> int:
        """Return which of the data-parallel shards of its experts' state the rank holds, from 0 on."""
        return self._index_along(rank, self.of_experts.sharding_axes)

    def _index_along(self, rank: int, axes: Iterable[str]) -> int:
        """Return the rank's index among those along some axes, which are named in the mesh's order."""
        coordinates, index = self.coordinates(rank), 0
        for axis in axes:
            index = index * self.axis_sizes[axis] + coordinates[axis]
        return index

    def group_name(self, *axes: str) -> str:
        """Return the name of the group along these axes, without axes of a single rank: `dp_shard+cp`."""
        return "+".join(axis for axis, size in self.axis_sizes.items() if axis in axes and size > 1)

    @cached_property
    def sharding_axes(self) -> tuple[str, ...]:
        """The axes whose data-parallel ranks shard model state; fully_shard also shards over the sequence's."""
        with_ep = ("ep",) if self.ep_enabled and self.ep_degree == "dp_shard" else ()
        with_cp = ("cp",) if self.data_parallel == "fsdp" and self.zero_stage > 0 else ()
        return ("dp_shard", *with_ep, *with_cp)

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold copies, whose gradients are averaged."""
        own = (axis for axis in DATA_AXES if axis != "ep" or self.ep_enabled)
        return tuple(axis for axis in own if axis not in self.sharding_axes)

    def axes_size(self, axes: Iterable[str]) -> int:
        """Return the number of ranks along these axes."""
        return math.prod(self.axis_sizes[axis] for axis in axes)

    def sequence_chunks(self, rank: int, seq_len: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) of the rank's chunks of every sequence, in order.

        Where ranks gather keys, each has one of 2 cp equal chunks from the front and one from the back: causal
        attention is then as much work on every rank (Llama 3, arXiv 2407.21783, section 3.3.2). Where they exchange
        heads, attention is of whole sequences on every rank, and each has one of cp equal chunks.
        """
        parts, cp_rank = self.sequence_parts, self.coordinates(rank)["cp"]
        size = seq_len // parts
        own = (cp_rank, parts - 1 - cp_rank) if self.gathers_keys else (cp_rank,)
        return tuple((i * size, (i + 1) * size) for i in own)

    @property
    def partitions_by_parameter(self) -> bool:
        """Whether each parameter's optimizer state is on one rank as a whole, as ZeroRedundancyOptimizer has it.

        The ranks' shares are then only about equal.
        """
        return self.data_parallel == "ddp" and self.zero_stage == 1

    def shard_count(self, kind: str) -> int:
        """Return the number of data-parallel shards of a kind of model state.

        `kind` is parameters or optimizer (at rest) or gradients (after reduction). The stages are ZeRO's (arXiv
        1910.02054); fully_shard shards parameters at rest in every mode.
        """
        degree = self.axes_size(self.sharding_axes)
        if kind == "parameters" and self.data_parallel == "fsdp":
            return degree
        first_stage = {"optimizer": 1, "gradients": 2, "parameters": 3}[kind]
        return degree if self.zero_stage >= first_stage else 1

    def expert_shards(self, shards: int) -> int:
        """Return the number of data-parallel shards of this rank's experts where so many have other parameters."""
        return max(1, shards // self.ep)

    def undivided_ep(self, kind: str) -> int:
        """Return by how much expert parallelism divides a kind of experts' state beside data-parallel shards.

        These divide experts by as much less, so that a rank has the same share of all state.
        """
        return 1 if self.shard_count(kind) > 1 else self.ep

    @property
    def uses_deepspeed_zero(self) -> bool:
        """Whether DeepSpeed implements ZeRO, whichever engine calls DeepSpeed."""
        return self.data_parallel == "none" and self.zero_stage > 0

    @property
    def offloaded_state(self) -> tuple[str, ...]:
        """The kinds of model state in the host's memory.

        The optimizer takes along the gradients that it reads (ZeRO-Offload, arXiv 2101.06840).
        """
        state = ("gradients", "optimizer")
        return {"none": (), "optimizer": state, "parameters": ("parameters", *state)}[self.offload]

    def grad_accumulation_steps(self, train: TrainConfig) -> int:
        """Return the number of micro-batches that a rank takes in a step.

        Raises UserError if the global batch leaves a remainder.
        """
        per_pass = train.micro_batch * self.dp
        if train.global_batch % per_pass:
            raise UserError(
                f"train.global_batch={train.global_batch} is not a multiple of train.micro_batch={train.micro_batch}"
                f" x {self.dp} data-parallel ranks: choose a multiple of {per_pass}"
            )
        return train.global_batch // per_pass

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, as a run's record has them."""
        return dataclasses.asdict(self)


def micro_batches_per_round(pp: int, micro_batches: int) -> int:
    """Return how many micro-batches a looped schedule takes through a stage before the rank's next one."""
    return micro_batches // max(1, micro_batches // pp)


def resolve_layout(strategy: StrategyConfig, world_size: int) -> Layout:
    """Return the strategy's layout of a world, with the open degree (-1) filled in.

    A strategy whose degrees are all 1 trains on one rank, whatever the world. Raises UserError if the degrees do not
    make up the world.
    """
    degrees = {axis: getattr(strategy, axis) for axis in DEGREES if axis != "ep"}
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise UserError(f"strategy.{open_axes[1]}=-1 beside strategy.{open_axes[0]}=-1: only one degree may be -1")
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    stated = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1"
    if open_axes:
        if world_size % fixed:
            raise UserError(
                f"world_size={world_size} is not divisible by the strategy's degrees ({stated}): choose a multiple of"
                f" {fixed}"
            )
        degrees[open_axes[0]] = world_size // fixed
    elif fixed not in (1, world_size):
        raise UserError(
            f"world_size={world_size} is not the product of the strategy's degrees ({stated}): choose"
            f" world_size={fixed}, or -1 for a degree"
        )
    fields = {field.name: getattr(strategy, field.name) for field in dataclasses.fields(Layout)}
    layout = Layout(**fields | degrees)
    degree = getattr(layout, layout.ep_degree)
    if degree % layout.ep:
        raise UserError(
            f"strategy.ep={layout.ep} does not divide the data-parallel ranks (strategy.{layout.ep_degree}={degree}):"
            f" choose {divisors_text(degree)}"
        )
    return layout
