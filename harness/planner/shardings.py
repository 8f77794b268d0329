"""The ways in which data-parallel ranks share model state, by what a stack has. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from harness.config.stack_memory import StackMemory
from harness.config.strategy import DataParallel
from harness.runner.resolve import load_strategy_preset


@dataclass(frozen=True)
class Sharding:
    """What the ways of sharding depend on: the degrees, a node's devices, and whether a host has room for state."""

    dp: int
    tp: int
    cp: int
    pp: int
    gpus_per_node: int
    offloads: bool
    is_mixed: bool  # whether the precision has master weights


def shardings(sharding: Sharding, memory: StackMemory) -> list[dict[str, Any]]:
    """Return the ways to share model state among data-parallel ranks, as values of a strategy."""
    if sharding.dp * sharding.cp == 1:
        return [{"engine": "torch"}]
    return of_this_project(sharding) if memory.kind == "harness" else of_another(sharding, memory)


def of_another(sharding: Sharding, memory: StackMemory) -> list[dict[str, Any]]:
    """Return replicas, ZeRO's first stage and shards of parameters, as far as another stack has them.

    Flat units are sharded by one wrapper in all modes; other stacks replicate weights beside sharded optimizer state.
    """
    dp, stages = sharding.dp, memory.zero_stages
    replicas: DataParallel = "fsdp" if memory.kind == "flat_units" else "ddp"
    ways: list[dict[str, Any]] = []
    if 0 in stages:
        ways.append({"data_parallel": replicas, "dp_replicate": dp})
    if 1 in stages and dp > 1:
        ways.append({"data_parallel": "ddp", "zero_stage": 1, "dp_shard": dp})
    return ways + [way for way in sharded(sharding) if way["zero_stage"] in stages]


def of_this_project(sharding: Sharding) -> list[dict[str, Any]]:
    """Return replicas, DeepSpeed's stages and fully_shard's modes, with what each can keep on the host."""
    dp, tp = sharding.dp, sharding.tp
    ways: list[dict[str, Any]] = []
    if tp == 1:
        ways.append({"engine": "torch", "data_parallel": "ddp", "dp_replicate": dp})
        if dp > 1 and not sharding.is_mixed:  # ZeroRedundancyOptimizer keeps masters whole
            ways.append({"engine": "torch", "data_parallel": "ddp", "zero_stage": 1, "dp_shard": dp})
    elif dp > 1:
        ways.append({"engine": "torch", "data_parallel": "fsdp", "zero_stage": 0, "dp_replicate": dp})
    if dp > 1 and sharding.cp == sharding.pp == tp == 1:
        for way in deepspeed_ways(dp):
            has_parameters = way["zero_stage"] == 3
            offloads = ("none", "optimizer", "parameters")[: 2 + has_parameters] if sharding.offloads else ("none",)
            ways += [way | {"offload": offload} for offload in offloads]
    ways += sharded(sharding)
    if sharding.offloads:
        ways += [way | {"offload": "parameters"} for way in sharded(sharding) if way["zero_stage"] == 3]
    return ways


def deepspeed_ways(dp: int) -> list[dict[str, Any]]:
    """Return DeepSpeed's stages with the settings of the papers, and with those that it recommends for speed."""
    presets = [load_strategy_preset(f"zero{stage}{settings}") for stage in (1, 2, 3) for settings in ("", "_tuned")]
    keys = ("engine", "zero_stage", "options", "literature")
    return [{key: getattr(preset, key) for key in keys} | {"dp_shard": dp} for preset in presets]


def sharded(sharding: Sharding) -> list[dict[str, Any]]:
    """Return fully_shard's stages 2 and 3 over all data-parallel ranks, and over those of a node with replicas."""
    dp, cp = sharding.dp, sharding.cp
    node_sizes = (sharding.gpus_per_node // sharding.tp, sharding.gpus_per_node)
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
