"""The candidates of a search: every layout, checkpointing and micro-batch for a model on a world. Imports no torch."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from harness.config.checkpointing import Checkpointing, CheckpointingConfig
from harness.config.schema import RunConfig
from harness.config.strategy import DataParallel, Schedule, StrategyConfig
from harness.layout.layout import Layout, resolve_layout

MOST_TP = 64  # ranks; attention heads and nodes are fewer in every published layout

MOST_MICRO_BATCH = 16  # sequences

MOST_VIRTUAL_STAGES = 4

CHECKPOINTINGS: tuple[Checkpointing, ...] = ("none", "selective", "attention", "full")

LONG_SEQUENCE = 16384  # tokens from which context parallelism is searched


@dataclass(frozen=True)
class Restrictions:
    """The settings of a search that its command line fixes; everything else is open."""

    strategy: Mapping[str, Any]  # by the key of the strategy
    checkpointing: CheckpointingConfig | None = None
    micro_batch: int | None = None

    def allows(self, strategy: StrategyConfig) -> bool:
        """Return whether a strategy has every value that is fixed."""
        return all(value == -1 or getattr(strategy, key) == value for key, value in self.strategy.items())


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    return _divisors(number)


@cache
def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def strategies(config: RunConfig, world_size: int, gpus_per_node: int) -> Iterator[StrategyConfig]:
    """Yield the strategies of a world: all degrees, ZeRO stages, ways of sharding and schedules.

    Context parallelism is for long sequences, and replicas of shards are as large as whole nodes.
    """
    model, cp_degrees = config.model, [1]
    if config.train.seq_len >= LONG_SEQUENCE:
        cp_degrees = [size for size in divisors(world_size) if config.train.seq_len % (2 * size) == 0 and size <= 64]
    for tp in divisors(world_size):
        if tp > MOST_TP or model.num_key_value_heads % tp or model.intermediate_size % tp:
            continue
        for cp in cp_degrees:
            for pp in divisors(world_size // tp):
                if world_size % (tp * cp * pp) or pp > model.num_hidden_layers:
                    continue
                dp = world_size // (tp * cp * pp)
                if config.train.global_batch % dp:
                    continue
                for sharding in _shardings(dp, tp, cp, pp, gpus_per_node):
                    for schedule in _schedules(pp, model.num_hidden_layers):
                        for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                            yield StrategyConfig(
                                name="search",
                                tp=tp,
                                cp=cp,
                                pp=pp,
                                sequence_parallel=sequence_parallel,
                                **sharding,
                                **schedule,
                            )


def _shardings(dp: int, tp: int, cp: int, pp: int, gpus_per_node: int) -> list[dict[str, Any]]:
    """Return the ways to share model state among data-parallel ranks."""
    fsdp: DataParallel = "fsdp"
    found_shardings: list[dict[str, Any]] = []
    if dp * cp > 1 and tp == 1:
        found_shardings.append({"engine": "torch", "data_parallel": "ddp", "dp_replicate": dp})
    if dp * cp == 1:
        return [{"engine": "torch"}]
    if tp > 1 and pp >= 1 and dp > 1:
        found_shardings.append({"engine": "torch", "data_parallel": fsdp, "zero_stage": 0, "dp_replicate": dp})
    if dp > 1 and cp == 1 and pp == 1 and tp == 1:
        options = {"reduce_bucket_size": 500000, "overlap_comm": True}
        found_shardings += [
            {"engine": "deepspeed", "zero_stage": stage, "dp_shard": dp, "options": options} for stage in (1, 2, 3)
        ]
    within_nodes = {size for size in (gpus_per_node // tp, gpus_per_node) if size > 1 and dp % size == 0}
    for shard in sorted({dp, *within_nodes}):
        found_shardings += [
            {
                "engine": "torch",
                "data_parallel": fsdp,
                "zero_stage": stage,
                "dp_shard": shard,
                "dp_replicate": dp // shard,
            }
            for stage in (2, 3)
            if shard * cp > 1
        ]
    return found_shardings


def _schedules(pp: int, layers: int) -> list[dict[str, Any]]:
    """Return the schedules of a pipeline."""
    if pp == 1:
        return [{}]
    schedules: list[tuple[Schedule, int]] = [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1)]
    virtual = [size for size in range(2, MOST_VIRTUAL_STAGES + 1) if pp * size <= layers]
    schedules += [("interleaved_1f1b", size) for size in virtual]
    return [{"schedule": cast("str", schedule), "virtual_stages": size} for schedule, size in schedules]


def candidates(
    config: RunConfig, world_size: int, gpus_per_node: int, restrictions: Restrictions
) -> Iterator[tuple[RunConfig, Layout]]:
    """Yield every candidate with its layout; the rules of a run are not applied yet."""
    checkpointings: Sequence[CheckpointingConfig] = [CheckpointingConfig(name) for name in CHECKPOINTINGS]
    if restrictions.checkpointing is not None:
        checkpointings = [restrictions.checkpointing]
    trains = {
        size: dataclasses.replace(config.train, micro_batch=size) for size in _micro_batches(config, restrictions)
    }
    for strategy in strategies(config, world_size, gpus_per_node):
        if not restrictions.allows(strategy):
            continue
        layout = resolve_layout(strategy, world_size)
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
