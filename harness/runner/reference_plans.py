"""The layouts that can be the reference of a run, in the order in which they are tried, and the same with fewer layers.

They are a single process; where it does not fit, a single process with full checkpointing; ranks that shard everything
besides; and on a GPU such ranks whose model state is on the host.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.config.checkpointing import CheckpointingConfig
from harness.config.schema import RunConfig
from harness.config.strategy import StrategyConfig
from harness.cost_model.flops import executed_flops
from harness.hardware.peak_flops import peak_flops
from harness.layout.layout import Layout, resolve_layout
from harness.records.rank_report import RankReport
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Cells, Record
from harness.records.store import read_record
from harness.runner.plan import Plan, capacity_problem, make_plan
from harness.runner.resolve import load_strategy_preset, with_layers
from harness.util.errors import UserError

SINGLE_PROCESS = StrategyConfig(name="single")

FULLY_SHARDED = StrategyConfig(name="fsdp_full_shard", data_parallel="fsdp", zero_stage=3, dp_shard=-1)

OFFLOADED = dataclasses.replace(FULLY_SHARDED, offload="parameters")

FULL = CheckpointingConfig("full")


def reference_configs(plan: Plan) -> Iterator[RunConfig]:
    """Yield the configurations that a run may be compared with, the first that fits first.

    One of the run's own layout and engine has the same faults and is the last choice; fully sharded ranks of PyTorch
    are then compared with those of DeepSpeed.
    """
    yield single_process(plan.config)
    train = dataclasses.replace(plan.config.train, fused_optimizer=True, compile=False)
    saving = dataclasses.replace(plan.config, train=train, checkpointing=FULL, world_size=None, repeat=0)
    world_size = math.gcd(most_ranks(plan), train.global_batch)
    configs = [dataclasses.replace(saving, strategy=SINGLE_PROCESS)]
    if world_size > 1:
        configs.append(sharded(saving, FULLY_SHARDED, world_size))
    if plan.machine.device == "cuda":  # on a CPU the host is the device, and offload saves nothing
        configs.append(sharded(saving, OFFLOADED, world_size))
    same = [config for config in configs if is_same_layout(config, plan.layout)]
    others = [config for config in configs if config not in same]
    if any(config.strategy.data_parallel == "fsdp" for config in same):
        others.append(sharded(saving, load_strategy_preset("zero3"), world_size))
    yield from (*others, *same)


def most_ranks(plan: Plan) -> int:
    """Return how many ranks a reference may have: those of the run, or of the machine.

    A run that others run beside sees some of the machine's devices.
    """
    machine, ranks = plan.machine, plan.config.world_size or plan.machine.world_size
    return min(ranks, machine.devices * machine.nodes) if machine.device == "cuda" else ranks


def single_process(config: RunConfig) -> RunConfig:
    """Return the same training by one process, without any option that only saves time or memory."""
    train = dataclasses.replace(config.train, loss_chunks=1, fused_optimizer=True, compile=False)
    return dataclasses.replace(
        config,
        strategy=SINGLE_PROCESS,
        checkpointing=CheckpointingConfig("none"),
        train=train,
        world_size=None,
        repeat=0,
    )


def sharded(config: RunConfig, strategy: StrategyConfig, world_size: int) -> RunConfig:
    """Return the same training by ranks that share the batch, in micro-batches that they can divide it into."""
    micro_batch = math.gcd(config.train.micro_batch, config.train.global_batch // world_size)
    train = dataclasses.replace(config.train, micro_batch=micro_batch)
    return dataclasses.replace(config, strategy=strategy, train=train, world_size=world_size)


def is_same_layout(config: RunConfig, layout: Layout) -> bool:
    """Return whether the configuration has the engine and the layout of a run, wherever its model state is."""
    resolved = resolve_layout(config.strategy, config.world_size or 1)
    return resolved == dataclasses.replace(layout, offload=resolved.offload)


def plan_reference(config: RunConfig, plan: Plan) -> Plan:
    """Return the plan of a reference of another plan's run. Raises UserError if it is impossible."""
    proof = dataclasses.replace(plan.command.proof, reference=False)
    command = dataclasses.replace(plan.command, proof=proof, force=False)
    return make_plan(config, plan.machine, command, is_reference=True)


def is_single_process(plan: Plan) -> bool:
    """Return whether the training of this plan counts as right by itself."""
    return plan.config == single_process(plan.config)


def fewer_layers(plan: Plan) -> Iterator[tuple[Plan, Plan]]:
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


def recorded_layers(plan: Plan) -> list[int]:
    """Return with how many layers the layout of a reference is recorded, the most first."""
    recorded = []
    for folder in plan.folder.comparison.recorded_runs(f"{plan.run_id.rpartition('-')[0]}-*"):
        try:
            layers = int(read_record(folder.path).config["model"]["num_hidden_layers"])
        except UserError:
            continue
        if plan_reference(with_layers(plan.config, layers), plan).run_id == folder.path.name:
            recorded.append(layers)
    return sorted(recorded, reverse=True)


def most_layers_that_fit(plan: Plan) -> int:
    """Return the largest number of layers, below the model's own, that one process is predicted to fit; 0 for none."""
    fitting, excess = 0, plan.config.model.num_hidden_layers
    while excess - fitting > 1:
        layers = (fitting + excess) // 2
        single = plan_reference(single_process(with_layers(plan.config, layers)), plan)
        predicted = dataclasses.replace(single, command=dataclasses.replace(single.command, preflight=True))
        if capacity_problem(predicted, ()) is None:
            fitting = layers
        else:
            excess = layers
    return fitting


@dataclass(frozen=True)
class Reference:
    """The finished run that another run is compared with, or a note that says why there is none.

    A single process that keeps all activations counts as right. The training of any other layout is compared in its
    turn, with fewer layers, with the reference `shallower`: a chain that ends at such a process.
    """

    note: str  # what a run is compared with and how far back that reaches, or why it is compared with nothing
    plan: Plan | None = None  # None where there is no such run
    report: RankReport | None = None  # what its ranks report together
    seconds: float = 0.0  # how long it ran, with all runs of its chain
    shallower: "Reference | None" = None  # what the same layout was compared with on fewer layers
    failure: Cells | None = None  # status and reason of a row that cannot be proven because the reference failed

    @property
    def proven_layers(self) -> int | None:
        """The number of layers that the single process at the end of the chain trained; None without a reference."""
        if self.shallower is not None:
            return self.shallower.proven_layers
        return None if self.plan is None else self.plan.config.model.num_hidden_layers

    @property
    def columns(self) -> Cells:
        """The columns of a row that is compared with this."""
        columns: Cells = {"reference": self.note}
        if self.plan is not None:
            columns |= {"reference_layers": self.proven_layers, "reference_seconds": self.seconds}
        return columns


def chain_text(plan: Plan, single: Plan) -> str:
    """Return how a layout was compared with a single process that trained fewer layers."""
    layers, all_layers = single.config.model.num_hidden_layers, plan.config.model.num_hidden_layers
    return f"compared on {layers} of {all_layers} layers with {single.run_id}"


ASSUMED_MFU = 0.4  # the share of the device's peak that large models reach, for devices that have timed nothing yet

TRAININGS = 2  # by a reference: its own, and one that differs from it in rounding


@dataclass(frozen=True)
class Speed:
    """The operations that one device runs in a second; on a CPU, those of the whole machine, which its ranks share."""

    flops_per_second: float
    source: str  # what it is known from, such as the id of a run


@dataclass(frozen=True)
class Cost:
    """The predicted duration of a run."""

    seconds: float
    source: str

    def __str__(self) -> str:
        return f"{self.seconds:,.0f} s at the speed of {self.source}"


def predict_cost(plan: Plan) -> Cost | None:
    """Return how long a reference will train; None where nothing tells the speed of this machine."""
    speed = measured_speed(plan) or assumed_speed(plan)
    if speed is None:
        return None
    device = plan.machine.device
    flops = executed_flops(plan.config, plan.layout, device, plan.widths.recomputes_last_projection)
    per_device = flops / (plan.layout.world_size if device == "cuda" else 1)
    return Cost(TRAININGS * plan.config.train.total_steps * per_device / speed.flops_per_second, speed.source)


def measured_speed(plan: Plan) -> Speed | None:
    """Return the highest speed that a run or a reference of the comparison reached with the same model and tokens."""
    folders = (plan.comparison, ComparisonFolder(plan.comparison.references))
    speeds: list[Speed] = []
    for folder in (run for comparison in folders for run in comparison.recorded_runs(f"*-{plan.config.model.name}-*")):
        try:
            record = read_record(folder.path)
        except UserError:
            continue
        speeds += [] if (speed := speed_of(record, plan)) is None else [speed]
    return max(speeds, key=lambda speed: speed.flops_per_second, default=None)


def speed_of(record: Record, plan: Plan) -> Speed | None:
    """Return the speed of a recorded run; None if it tells nothing about the plan's."""
    row, config = record.row, plan.config
    alike = {
        "status": "ok",
        "measured_on": plan.machine.device_name,
        "model": config.model.name,
        "precision": config.precision.name,
        "seq_len": config.train.seq_len,
    }
    flops, seconds = row.get("executed_flops"), row.get("step_seconds")
    if any(row.get(key) != value for key, value in alike.items()) or not flops or not seconds:
        return None
    devices = row["world_size"] if plan.machine.device == "cuda" else 1
    return Speed(flops / seconds / devices, record.run_id)


def assumed_speed(plan: Plan) -> Speed | None:
    """Return the speed of large models on the machine's device; None where its peak is not known, as on a CPU."""
    peak = peak_flops(plan.machine.device_name, plan.config.precision.compute)
    return None if peak is None else Speed(ASSUMED_MFU * peak, f"{ASSUMED_MFU:.0%} of a device's peak")
