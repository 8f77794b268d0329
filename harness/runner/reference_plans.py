"""The layouts that can be the reference of a run, in the order in which they are tried, and the same with fewer layers.

They are a single process; where it does not fit, a single process with full checkpointing; ranks that shard everything
besides; and on a GPU such ranks whose model state is on the host.
"""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.config.schema import Checkpointing, CheckpointingConfig, RunConfig
from harness.config.strategy import StrategyConfig
from harness.layout.layout import Layout, resolve_layout
from harness.records.rank_report import RankReport
from harness.records.schema import Cells
from harness.records.store import readable_records
from harness.runner.plan import RunPlan, capacity_problem, make_plan
from harness.runner.resolve import load_strategy_preset, with_layers
from harness.util.errors import UserError

SINGLE_PROCESS = StrategyConfig(name="single")
FULLY_SHARDED = StrategyConfig(name="fsdp_full_shard", data_parallel="fsdp", zero_stage=3, dp_shard=-1)
OFFLOADED = replace(FULLY_SHARDED, offload="parameters")


@dataclass(frozen=True)
class Reference:
    """The finished run that another run is compared with, or a note that says why there is none.

    A single process that keeps all activations counts as right. The training of any other layout is compared in its
    turn, with fewer layers, with the reference `shallower`: a chain that ends at such a process.
    """

    note: str  # what a run is compared with and how far back that reaches, or why it is compared with nothing
    plan: RunPlan | None = None  # None where there is no such run
    report: RankReport | None = None  # what its ranks report together
    seconds: float = 0.0  # how long it ran, with all runs of its chain
    shallower: "Reference | None" = None  # what the same layout was compared with on fewer layers
    failure: Cells | None = None  # status and reason of a row that cannot be proven because the reference failed

    @property
    def columns(self) -> Cells:
        """The columns of a row that is compared with this, with the layers that the end of the chain trained."""
        if self.plan is None:
            return {"reference": self.note}
        single = (self.shallower or self).plan or self.plan
        layers = single.config.model.num_hidden_layers
        return {"reference": self.note, "reference_layers": layers, "reference_seconds": self.seconds}


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
    configs = [full]
    if world_size > 1:
        configs.append(sharded(full, FULLY_SHARDED, world_size))
    if machine.device == "cuda":  # on a CPU the host is the device, and offload saves nothing
        configs.append(sharded(full, OFFLOADED, world_size))
    same = [config for config in configs if is_same_layout(config, plan.layout)]
    others = [config for config in configs if config not in same]
    if any(config.strategy.data_parallel == "fsdp" for config in same):
        others.append(sharded(full, load_strategy_preset("zero3"), world_size))
    yield from (*others, *same)


def single_process(config: RunConfig, checkpointing: Checkpointing = "none", loss_chunks: int = 1) -> RunConfig:
    """Return the same training by one process; by default without any option that only saves time or memory."""
    return replace(
        config,
        strategy=SINGLE_PROCESS,
        checkpointing=CheckpointingConfig(checkpointing),
        train=replace(config.train, loss_chunks=loss_chunks, fused_optimizer=True, compile=False),
        world_size=None,
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


def plan_reference(config: RunConfig, plan: RunPlan) -> RunPlan:
    """Return the plan of a reference of another plan's run. Raises UserError if it is impossible."""
    proof = replace(plan.command.proof, reference=False)
    command = replace(plan.command, proof=proof, force=False)
    return make_plan(config, plan.machine, command, is_reference=True)


def is_single_process(plan: RunPlan) -> bool:
    """Return whether the training of this plan counts as right by itself."""
    return plan.config == single_process(plan.config)


def fewer_layers(plan: RunPlan) -> Iterator[tuple[RunPlan, RunPlan]]:
    """Yield the same layout with fewer layers, and the single process with as many, until one that fits is accepted.

    The first has the most layers that are predicted to fit, or up to half as many if a run with these is recorded: what
    fits varies with the memory that is free. Each further pair has half as many as the one before it. Raises UserError
    if not even one layer is predicted to fit.
    """
    layers = most_layers_that_fit(plan)
    if layers == 0 and plan.command.preflight:
        raise UserError("not even one of its layers fits a single process, with which it could be compared")
    layers = min(max(layers, 1), plan.config.model.num_hidden_layers - 1)
    if layers == 0:
        raise UserError("it has one layer only, so that nothing smaller could be compared with a single process")
    layers = next((n for n in recorded_layers(plan) if layers // 2 < n <= layers), layers)
    while layers:
        shallow = with_layers(plan.config, layers)
        yield plan_reference(shallow, plan), plan_reference(single_process(shallow), plan)
        layers //= 2


def recorded_layers(plan: RunPlan) -> list[int]:
    """Return with how many layers the layout of a reference is recorded, the most first."""
    records = readable_records(plan.folder.comparison, f"{plan.run_id.rpartition('-')[0]}-*")
    layers = {record.run_id: int(record.config["model"]["num_hidden_layers"]) for record in records}
    same = (n for run_id, n in layers.items() if plan_reference(with_layers(plan.config, n), plan).run_id == run_id)
    return sorted(same, reverse=True)


def most_layers_that_fit(plan: RunPlan) -> int:
    """Return the largest number of layers, below the model's own, that one process is predicted to fit; 0 for none."""

    def is_too_deep(layers: int) -> bool:
        single = plan_reference(single_process(with_layers(plan.config, layers)), plan)
        predicted = replace(single, command=replace(single.command, preflight=True))
        return capacity_problem(predicted, ()) is not None

    return bisect.bisect_left(range(1, plan.config.model.num_hidden_layers), True, key=is_too_deep)
