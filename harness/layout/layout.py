"""How the ranks are arranged, and how model state and batch are divided among them."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.schema import StrategyConfig, TrainConfig
from harness.util.errors import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first, in the order of ranks

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")


@dataclass(frozen=True)
class Layout:
    """A strategy resolved against a world: every degree known, their product the number of ranks."""

    engine: str
    data_parallel: str
    zero_stage: int
    dp_replicate: int
    dp_shard: int
    tp: int
    sequence_parallel: bool
    cp: int
    pp: int
    schedule: str
    virtual_stages: int
    layers_per_stage: tuple[int, ...] | None
    offload: str
    vocabulary_parallel: bool = True

    @property
    def dp(self) -> int:
        """The data degree: how many parts the global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def vocabulary_tp(self) -> int:
        """Into how many parts tensor parallelism cuts embedding and head."""
        return self.tp if self.vocabulary_parallel else 1

    @property
    def num_stages(self) -> int:
        """Parts that the model's depth is cut into."""
        return self.pp * self.virtual_stages

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh_shape)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place on every axis."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def data_rank(self, rank: int) -> int:
        """Which part of the global batch the rank trains on, 0 to dp - 1."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def group_name(self, *axes: str) -> str:
        """The name of a group that lies along these axes, those of one rank left out: dp_shard+cp."""
        return "+".join(axis for axis in AXES if axis in axes and getattr(self, axis) > 1)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """The axes over which data-parallel ranks divide what they divide: with fully_shard also the sequence's."""
        return ("dp_shard", "cp") if self.data_parallel == "fsdp" and self.zero_stage > 0 else ("dp_shard",)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold copies, whose gradients are averaged."""
        return tuple(axis for axis in ("dp_replicate", "dp_shard", "cp") if axis not in self.sharding_axes)

    def axes_size(self, axes: Iterable[str]) -> int:
        """Ranks along these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def sequence_chunks(self, rank: int, seq_len: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of those parts of every sequence that the rank has, in order.

        Of 2 cp equal chunks one from the front and one from the back, so that causal attention is as much work on
        every rank (Llama 3, arXiv 2407.21783, section 3.3.2).
        """
        place = self.coordinates(rank)["cp"]
        chunk = seq_len // (2 * self.cp)
        chunks = (place, 2 * self.cp - 1 - place)
        return ((0, seq_len),) if self.cp == 1 else tuple((i * chunk, (i + 1) * chunk) for i in chunks)

    @property
    def partitions_by_parameter(self) -> bool:
        """Whether optimizer state is divided by parameter: ZeroRedundancyOptimizer's shares are only about equal."""
        return self.data_parallel == "ddp" and self.zero_stage == 1

    def shard_count(self, kind: str) -> int:
        """In how many parts data-parallel ranks hold parameters or optimizer at rest, or reduced gradients.

        ZeRO, arXiv 1910.02054; fully_shard divides parameters at rest in every mode.
        """
        degree = self.axes_size(self.sharding_axes)
        if kind == "parameters" and self.data_parallel == "fsdp":
            return degree
        first_stage = {"optimizer": 1, "gradients": 2, "parameters": 3}[kind]
        return degree if self.zero_stage >= first_stage else 1

    @property
    def uses_deepspeed_zero(self) -> bool:
        """Whether ZeRO is DeepSpeed's, whichever engine calls DeepSpeed."""
        return self.data_parallel == "none" and self.zero_stage > 0

    @property
    def offloaded_state(self) -> tuple[str, ...]:
        """Kinds of model state that lie in the host's memory. With the optimizer go the gradients that it reads
        (ZeRO-Offload, arXiv 2101.06840).
        """
        state = ("gradients", "optimizer")
        return {"none": (), "optimizer": state, "parameters": ("parameters", *state)}[self.offload]

    def micro_batches_per_round(self, micro_batches: int) -> int:
        """Return how many micro-batches a looped schedule takes through one stage before the rank's next stage."""
        return micro_batches // max(1, micro_batches // self.pp)

    def grad_accumulation_steps(self, train: TrainConfig) -> int:
        """Micro-batches a rank and step. Raises UserError on a remainder."""
        per_pass = train.micro_batch * self.dp
        if train.global_batch % per_pass:
            raise UserError(
                f"train.global_batch={train.global_batch} is not a multiple of train.micro_batch={train.micro_batch}"
                f" x {self.dp} data-parallel ranks: choose a multiple of {per_pass}"
            )
        return train.global_batch // per_pass

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def resolve_layout(strategy: StrategyConfig, world_size: int) -> Layout:
    """The strategy's layout on that many ranks; a strategy of all ones is one process whatever the world.

    Raises UserError if the degrees do not make up the world.
    """
    degrees = {axis: getattr(strategy, axis) for axis in DEGREES}
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
            f" world_size={fixed}, or -1 for one of strategy.dp_replicate, dp_shard, tp, cp, pp"
        )
    names = {f.name for f in dataclasses.fields(Layout)} - degrees.keys()
    return Layout(**degrees, **{name: getattr(strategy, name) for name in names})


def is_data_parallel_axis(axis: str) -> bool:
    """Whether a group lies along ranks that have other tokens: what c10d gathers there are parameters."""
    return set(axis.split("+")) <= {"dp_replicate", "dp_shard", "cp"}


def group_axes(group_ranks: Sequence[int], layout: Layout) -> str:
    """The mesh axes along which a group lies, outermost first and joined by '+'.

    'world' is a group of every rank that lies along more than the data axes, 'self' one of a single rank.
    """
    places = [layout.coordinates(rank) for rank in group_ranks]
    axes = "+".join(axis for axis in AXES if len({place[axis] for place in places}) > 1)
    if "+" in axes and len(group_ranks) == layout.world_size and not is_data_parallel_axis(axes):
        return "world"
    return axes or "self"
