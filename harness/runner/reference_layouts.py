"""The configurations that a run may be compared with: other layouts that train the same."""

import math
from collections.abc import Iterator
from dataclasses import replace

from harness.config.schema import Checkpointing, CheckpointingConfig, RunConfig
from harness.config.strategy import StrategyConfig
from harness.layout.layout import Layout, resolve_layout
from harness.runner.plan import RunPlan, make_plan
from harness.runner.resolve import load_strategy_preset
from harness.util.text import count_text

FULLY_SHARDED = StrategyConfig(name="fsdp_full_shard", data_parallel="fsdp", zero_stage=3, dp_shard=-1)
OFFLOADED = replace(FULLY_SHARDED, offload="parameters")


def reference_configs(plan: RunPlan) -> Iterator[RunConfig]:
    """Yield the configurations that a run may be compared with, the first that fits first.

    One of the run's own layout and engine has the same faults and is the last choice; fully sharded ranks of PyTorch
    are then compared with those of DeepSpeed.
    """
    yield single_process(plan.config)
    full = single_process(plan.config, "full", plan.config.train.loss_chunks)
    machine, ranks = plan.machine, plan.config.world_size or plan.machine.world_size
    if machine.device == "cuda":  # of whose devices a run beside others sees a part
        ranks = min(ranks, machine.devices * machine.nodes)
    world_size = math.gcd(ranks, full.train.global_batch)
    # On a CPU the host is the device, and offload saves nothing.
    useful = ((FULLY_SHARDED, world_size > 1), (OFFLOADED, machine.device == "cuda"))
    configs = [full, *(sharded(full, strategy, world_size) for strategy, is_useful in useful if is_useful)]
    same = [config for config in configs if is_same_layout(config, plan.layout)]
    yield from (config for config in configs if config not in same)
    if any(config.strategy.data_parallel == "fsdp" for config in same):
        yield sharded(full, load_strategy_preset("zero3"), world_size)
    yield from same


def single_process(config: RunConfig, checkpointing: Checkpointing = "none", loss_chunks: int = 1) -> RunConfig:
    """Return the same training by one process; by default without any option that only saves time or memory.

    Only fully_shard casts fp32 weights to float8 to gather them. Others round them to 16 bits first.
    """
    casts_weights = config.precision.float8_all_gather
    return replace(
        config,
        strategy=load_strategy_preset("fsdp_full_shard") if casts_weights else StrategyConfig(name="single"),
        checkpointing=CheckpointingConfig(checkpointing),
        train=replace(config.train, loss_chunks=loss_chunks, fused_optimizer=True, compile=False, save="none"),
        world_size=1 if casts_weights else None,
        repeat=0,
    )


def sharded(config: RunConfig, strategy: StrategyConfig, world_size: int) -> RunConfig:
    """Return the same training by ranks that share the batch, in micro-batches that they can divide it into."""
    micro_batch = math.gcd(config.train.micro_batch, config.train.global_batch // world_size)
    train = replace(config.train, micro_batch=micro_batch)
    return replace(config, strategy=strategy, train=train, world_size=world_size)


def is_same_layout(config: RunConfig, layout: Layout) -> bool:
    """Return whether the configuration has the engine and the layout of a run, wherever its model state is."""
    resolved = resolve_layout(config.strategy, config.world_size or 1)
    return resolved == replace(layout, offload=resolved.offload)


def is_own_layout(plan: RunPlan, run: RunPlan) -> bool:
    """Return whether a reference has the run's own engine and layout, and so perhaps its faults."""
    return not is_single_process(plan) and is_same_layout(plan.config, run.layout)


def plan_reference(config: RunConfig, plan: RunPlan) -> RunPlan:
    """Return the plan of a reference of another plan's run. Raises UserError if it is impossible."""
    proof = replace(plan.command.proof, reference=False)
    command = replace(plan.command, proof=proof, force=False)
    return make_plan(config, plan.machine, command, is_reference=True)


def is_single_process(plan: RunPlan) -> bool:
    """Return whether the training of this plan counts as right by itself."""
    return plan.config == single_process(plan.config)


def layout_text(config: RunConfig) -> str:
    """Return the name of a reference's layout in a sentence."""
    ranks = f"{config.strategy.name} on {count_text(config.world_size, 'rank')}" if config.world_size else ""
    offload = "" if config.strategy.offload == "none" else f" with strategy.offload={config.strategy.offload}"
    checkpointing = "" if config.checkpointing.name == "none" else f" with checkpointing={config.checkpointing.name}"
    return (ranks or "a single process") + offload + checkpointing
