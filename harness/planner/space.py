"""The candidates of a search: every layout, checkpointing and micro-batch for a model on a world. Imports no torch."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from harness.config.checkpointing import CheckpointingConfig
from harness.config.schema import RunConfig
from harness.config.stack import StackConfig, StackMemory
from harness.config.strategy import DataParallel, Schedule, StrategyConfig
from harness.layout.layout import Layout, resolve_layout
from harness.runner.resolve import load_strategy_preset

MOST_TP = 64  # ranks; attention heads and nodes are fewer in every published layout

MOST_CP = 64  # ranks

LEAST_TOKENS = 1024  # of a sequence that a context-parallel rank has; with fewer, its kernels are too small to gain

MOST_MICRO_BATCH = 16  # sequences

MOST_VIRTUAL_STAGES = 4

CHECKPOINTINGS = (
    CheckpointingConfig("none"),
    CheckpointingConfig("selective"),
    CheckpointingConfig("attention"),
    CheckpointingConfig("every_n", every=2),
    CheckpointingConfig("full"),
)

OFFLOADED = (
    CheckpointingConfig("none", offload_activations=True),
    CheckpointingConfig("full", offload_activations=True),
)


@dataclass(frozen=True)
class Restrictions:
    """The settings of a search that its command line fixes; everything else is open."""

    strategy: Mapping[str, Any]  # by the key of the strategy
    checkpointing: CheckpointingConfig | None = None
    micro_batch: int | None = None
    checkpointing_values: Mapping[str, Any] = field(default_factory=dict)  # by its key, where the kind is open

    @property
    def wants_offload(self) -> bool:
        """Whether the command line puts state or activations on the host."""
        checkpointing = self.checkpointing is not None and self.checkpointing.offload_activations
        activations = self.checkpointing_values.get("offload_activations", checkpointing)
        return self.strategy.get("offload", "none") != "none" or bool(activations)

    def allows(self, strategy: StrategyConfig) -> bool:
        """Return whether a strategy has every value that is fixed."""
        return all(value == -1 or getattr(strategy, key) == value for key, value in self.strategy.items())


@dataclass(frozen=True)
class SearchedSpace:
    """What a search may choose from, beside the model and the batch."""

    world_size: int
    gpus_per_node: int
    stack: StackConfig
    offloads: bool  # whether devices have a host whose link is known
    restrictions: Restrictions


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, smallest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return (*small, *(number // size for size in reversed(small) if size * size != number))


def strategies(config: RunConfig, space: SearchedSpace) -> Iterator[StrategyConfig]:
    """Yield the strategies of a world: all degrees, ZeRO stages, ways of sharding, offloads and schedules.

    Replicas of shards are as large as whole nodes.
    """
    model, world_size = config.model, space.world_size
    for tp in divisors(world_size):
        if tp > MOST_TP or model.num_key_value_heads % tp or model.intermediate_size % tp:
            continue
        for cp in cp_degrees(config, space):
            for pp in divisors(world_size // tp):
                if world_size % (tp * cp * pp) or pp > model.num_hidden_layers:
                    continue
                if not space.stack.memory.has_model_parallelism and tp * cp * pp > 1:
                    continue
                dp = world_size // (tp * cp * pp)
                if config.train.global_batch % dp:
                    continue
                degrees = Degrees(dp, tp, cp, pp, space.gpus_per_node, space.offloads, config.precision.is_mixed)
                for choice in shardings(degrees, space.stack.memory):
                    for schedule in _schedules(pp, model.num_hidden_layers, space.stack):
                        for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                            yield StrategyConfig(
                                name="search",
                                tp=tp,
                                cp=cp,
                                pp=pp,
                                sequence_parallel=sequence_parallel,
                                **choice,
                                **schedule,
                            )


def cp_degrees(config: RunConfig, space: SearchedSpace) -> Sequence[int]:
    """Return the degrees of context parallelism that leave a rank enough tokens, or the one that is fixed."""
    fixed = space.restrictions.strategy.get("cp", -1)
    if fixed != -1:
        return (fixed,)
    tokens = config.train.seq_len
    sizes = [size for size in divisors(space.world_size) if tokens % (2 * size) == 0 and tokens >= LEAST_TOKENS * size]
    return [1, *(size for size in sizes if 1 < size <= MOST_CP)]


def _schedules(pp: int, layers: int, stack: StackConfig) -> list[dict[str, Any]]:
    """Return the schedules of a pipeline; only this project's engines have a zero-bubble one."""
    if pp == 1:
        return [{}]
    schedules: list[tuple[Schedule, int]] = [("1f1b", 1), ("gpipe", 1)]
    if stack.memory.kind == "harness":
        schedules.append(("zero_bubble", 1))
    virtual = [size for size in range(2, MOST_VIRTUAL_STAGES + 1) if pp * size <= layers]
    schedules += [("interleaved_1f1b", size) for size in virtual]
    return [{"schedule": cast("str", schedule), "virtual_stages": size} for schedule, size in schedules]


def candidates(config: RunConfig, space: SearchedSpace) -> Iterator[tuple[RunConfig, Layout]]:
    """Yield every candidate with its layout; the rules of a run are not applied yet."""
    restrictions = space.restrictions
    checkpointings: Sequence[CheckpointingConfig] = (*CHECKPOINTINGS, *(OFFLOADED if space.offloads else ()))
    if restrictions.checkpointing is not None:
        checkpointings = [restrictions.checkpointing]
    for key, value in restrictions.checkpointing_values.items():
        checkpointings = [choice for choice in checkpointings if getattr(choice, key) == value]
    trains = {
        size: dataclasses.replace(config.train, micro_batch=size) for size in _micro_batches(config, restrictions)
    }
    for strategy in strategies(config, space):
        if not restrictions.allows(strategy):
            continue
        layout = resolve_layout(strategy, space.world_size)
        for micro_batch, train in trains.items():
            if config.train.global_batch % (micro_batch * layout.dp):
                continue
            for checkpointing in checkpointings:
                yield (
                    dataclasses.replace(config, strategy=strategy, checkpointing=checkpointing, train=train),
                    layout,
                )


def _micro_batches(config: RunConfig, restrictions: Restrictions) -> list[int]:
    if restrictions.micro_batch is not None:
        return [restrictions.micro_batch]
    return [size for size in (2**power for power in range(10)) if size <= MOST_MICRO_BATCH]


@dataclass(frozen=True)
class Degrees:
    """What the ways of sharding depend on: the degrees, a node's devices, and whether a host has room for state."""

    dp: int
    tp: int
    cp: int
    pp: int
    gpus_per_node: int
    offloads: bool
    is_mixed: bool  # whether the precision has master weights


def shardings(degrees: Degrees, memory: StackMemory) -> list[dict[str, Any]]:
    """Return the ways to share model state among data-parallel ranks, as values of a strategy."""
    if degrees.dp * degrees.cp == 1:
        return [{"engine": "torch"}]
    return of_this_project(degrees) if memory.kind == "harness" else of_another(degrees, memory)


def of_another(degrees: Degrees, memory: StackMemory) -> list[dict[str, Any]]:
    """Return replicas, ZeRO's first stage and shards of parameters, as far as another stack has them.

    Flat units are sharded by one wrapper in all modes; other stacks replicate weights beside sharded optimizer state.
    """
    dp, stages = degrees.dp, memory.zero_stages
    replicas: DataParallel = "fsdp" if memory.kind == "flat_units" else "ddp"
    ways: list[dict[str, Any]] = []
    if 0 in stages:
        ways.append({"data_parallel": replicas, "dp_replicate": dp})
    if 1 in stages and dp > 1:
        ways.append({"data_parallel": "ddp", "zero_stage": 1, "dp_shard": dp})
    return ways + [way for way in sharded(degrees) if way["zero_stage"] in stages]


def of_this_project(degrees: Degrees) -> list[dict[str, Any]]:
    """Return replicas, DeepSpeed's stages and fully_shard's modes, with what each can keep on the host."""
    dp, tp = degrees.dp, degrees.tp
    ways: list[dict[str, Any]] = []
    if tp == 1:
        ways.append({"engine": "torch", "data_parallel": "ddp", "dp_replicate": dp})
        if dp > 1 and not degrees.is_mixed:  # ZeroRedundancyOptimizer keeps masters whole
            ways.append({"engine": "torch", "data_parallel": "ddp", "zero_stage": 1, "dp_shard": dp})
    elif dp > 1:
        ways.append({"engine": "torch", "data_parallel": "fsdp", "zero_stage": 0, "dp_replicate": dp})
    if dp > 1 and degrees.cp == degrees.pp == tp == 1:
        for way in deepspeed_ways(dp):
            has_parameters = way["zero_stage"] == 3
            offloads = ("none", "optimizer", "parameters")[: 2 + has_parameters] if degrees.offloads else ("none",)
            ways += [way | {"offload": offload} for offload in offloads]
    ways += sharded(degrees)
    if degrees.offloads:
        ways += [way | {"offload": "parameters"} for way in sharded(degrees) if way["zero_stage"] == 3]
    return ways


def deepspeed_ways(dp: int) -> list[dict[str, Any]]:
    """Return DeepSpeed's stages with the settings of the papers, and with those that it recommends for speed."""
    presets = [load_strategy_preset(f"zero{stage}{settings}") for stage in (1, 2, 3) for settings in ("", "_tuned")]
    keys = ("engine", "zero_stage", "options", "literature")
    return [{key: getattr(preset, key) for key in keys} | {"dp_shard": dp} for preset in presets]


def sharded(degrees: Degrees) -> list[dict[str, Any]]:
    """Return fully_shard's stages 2 and 3 over all data-parallel ranks, and over those of a node with replicas."""
    dp, cp = degrees.dp, degrees.cp
    node_sizes = (degrees.gpus_per_node // degrees.tp, degrees.gpus_per_node)
    within_nodes = {size for size in node_sizes if size > 1 and dp % size == 0}
    return [
        {
            "engine": "torch",
            "data_parallel": "fsdp",
            "zero_stage": stage,
            "dp_shard": shard,
            "dp_replicate": dp // shard,
        }
        for shard in sorted({dp, *within_nodes})
        for stage in (2, 3)
        if shard * cp > 1
    ]
