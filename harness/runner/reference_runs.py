"""The reference of a run: the cheapest layout that fits, and the chain of runs that proves its training.

It is a single process; where it does not fit, a single process with full checkpointing; ranks that shard everything
besides; and on a GPU such ranks whose model state is on the host. Any layout but a single process is first trained with
fewer layers, beside a single process of as many. A layout that does not fit, or that is too slow, is skipped with a
sentence, and takes no row with it; one that fails does.
"""

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter

from harness.config.schema import Checkpointing, CheckpointingConfig, RunConfig
from harness.config.strategy import StrategyConfig
from harness.cost_model.flops import executed_flops
from harness.hardware.machine import peak_flops
from harness.launcher.rank_entry import worker_entry
from harness.layout.layout import Layout, resolve_layout
from harness.proof import simulation
from harness.proof.reference import merge_reports
from harness.records.rank_report import RankReport
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Row
from harness.records.store import readable_records
from harness.runner.launch_run import RunContext, launch_run
from harness.runner.plan import RunPlan, capacity_problem, make_plan
from harness.runner.record import Reference
from harness.runner.resolve import load_strategy_preset, with_layers
from harness.runner.reuse import NO_REFERENCE, reusable_record
from harness.util.files import run_lock
from harness.util.text import UserError, count_text

FULLY_SHARDED = StrategyConfig(name="fsdp_full_shard", data_parallel="fsdp", zero_stage=3, dp_shard=-1)
OFFLOADED = replace(FULLY_SHARDED, offload="parameters")
ASSUMED_MFU = 0.4  # the share of the device's peak that large models reach, for devices that have timed nothing yet
TRAININGS = 2  # by a reference: its own, and one that differs from it in rounding


class SlowReferenceError(UserError):
    """A reference that does not end in time, so that others on as few devices would not either."""


class OutOfMemoryReferenceError(UserError):
    """A reference that ran out of memory, although it was expected to fit."""


class FailedReferenceError(Exception):
    """A reference that failed, so that every row that is compared with it fails too, with this status and reason."""


def get_reference(plan: RunPlan, context: RunContext) -> Reference:
    """Return the run's reference, which is trained once for a comparison and then reused.

    Raises FailedReferenceError if it or its proof fails.
    """
    if plan.config.launch in simulation.NO_REFERENCE:
        return Reference(simulation.NO_REFERENCE[plan.config.launch])
    if not plan.command.proof.reference:
        return Reference(NO_REFERENCE)
    if plan.config.model.dropout:
        return Reference(f"none: no other run drops the same values with model.dropout={plan.config.model.dropout}")
    problems: list[str] = []
    slow_devices = 0
    for config in reference_configs(plan):
        try:
            candidate = plan_reference(config, plan)
            if devices_used(candidate) > slow_devices:
                reference = prove_reference(candidate, context)
                if reference.shallower is None or not is_same_layout(config, plan.layout):
                    return reference
                note = f"{reference.note}; it has the same layout and engine as this run"  # and so perhaps its faults
                return replace(reference, note=note)
        except SlowReferenceError as error:
            slow_devices = max(slow_devices, devices_used(candidate))
            problems.append(f"{layout_text(config)} is too slow: {error}")
        except UserError as error:
            problems.append(f"{layout_text(config)} cannot be run: {error}")
    return Reference(f"none: {'; '.join(problems)}")


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
    """Return the same training by one process; by default without any option that only saves time or memory."""
    return replace(
        config,
        strategy=StrategyConfig(name="single"),
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


def layout_text(config: RunConfig) -> str:
    """Return the name of a reference's layout in a sentence."""
    ranks = f"{config.strategy.name} on {count_text(config.world_size, 'rank')}" if config.world_size else ""
    offload = "" if config.strategy.offload == "none" else f" with strategy.offload={config.strategy.offload}"
    checkpointing = "" if config.checkpointing.name == "none" else f" with checkpointing={config.checkpointing.name}"
    return (ranks or "a single process") + offload + checkpointing


def devices_used(plan: RunPlan) -> int:
    """Return the number of devices that a run uses; on a CPU the machine is one device, whose cores ranks share."""
    return plan.layout.world_size if plan.machine.device == "cuda" else 1


def prove_reference(plan: RunPlan, context: RunContext) -> Reference:
    """Return the reference of this plan, trained after its layout was proven with fewer layers.

    Raises UserError if it does not fit or is too slow, and FailedReferenceError if it or its proof fails.
    """
    if reusable_record(plan.config, plan.command, plan.folder) is None:
        refusal = capacity_problem(plan, ())
        if refusal:
            raise UserError(refusal.partition(": choose ")[0])
        refuse_slow(plan)
    if is_single_process(plan):
        return train_reference(plan, context, Reference(NO_REFERENCE))
    for shallow, single in fewer_layers(plan):
        try:
            root = train_reference(single, context, Reference(NO_REFERENCE))
        except OutOfMemoryReferenceError:
            continue
        shallow_run = train_reference(shallow, context, root)
        layers, all_layers = (run.config.model.num_hidden_layers for run in (single, plan))
        chain = f"its layout was compared on {layers} of {all_layers} layers with {single.run_id}"
        reference = train_reference(plan, context, Reference(f"none: {chain}"))
        seconds = reference.seconds + shallow_run.seconds + root.seconds
        return replace(reference, note=f"{reference.note}; {chain}", seconds=seconds, shallower=root)
    raise UserError("every single process with fewer layers, with which it could be compared, ran out of memory")


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


def train_reference(plan: RunPlan, context: RunContext, compared: Reference) -> Reference:
    """Return the run of this plan, compared with another one; it is made unless it is recorded with that comparison.

    Raises SlowReferenceError, OutOfMemoryReferenceError or FailedReferenceError.
    """
    with run_lock(plan.folder.lock):
        record, ranks = reusable_record(plan.config, plan.command, plan.folder), read_reports(plan)
        is_compared = compared.report is None or (record and record.proof.get("reference") == compared.note)
        if record is None or (record.status == "ok" and not (is_compared and ranks)):
            context.log(f"reference {plan.run_id}{refuse_slow(plan)}")
            record = launch_run(plan, replace(context, entry=worker_entry), compared)
            ranks = read_reports(plan)
    reason = record.row["reason"]
    if record.status == "oom":
        raise OutOfMemoryReferenceError(f"it ran out of memory: {reason}")
    if record.status == "timeout":
        raise SlowReferenceError(f"it ran into a time limit: {reason}")
    if record.status != "ok" or not ranks:
        reason = f"the reference {plan.run_id} failed, so that nothing proves this run: {reason}"
        raise FailedReferenceError("error" if record.status == "ok" else record.status, reason)
    return Reference(f"compared with {plan.run_id}", plan, merge_reports(ranks), record.row["duration_seconds"])


def refuse_slow(plan: RunPlan) -> str:
    """Return what the log says of the predicted duration; raise SlowReferenceError if it is beyond timeout_seconds."""
    cost = predict_cost(plan)
    if cost is None:
        return ""
    seconds, source = cost
    text = f"train for {seconds:,.0f} s at the speed of {source}"
    if seconds > plan.command.timeout_seconds:
        raise SlowReferenceError(f"it would {text}, and timeout_seconds={plan.command.timeout_seconds:g}")
    return f", predicted to {text}"


def read_reports(plan: RunPlan) -> list[RankReport]:
    """Return the reports of all ranks of a reference; none if one is missing or damaged."""
    try:
        ranks = plan.folder.read_rank_reports(plan.layout.world_size)
    except ValueError:
        return []
    return ranks if len(ranks) == plan.layout.world_size else []


def predict_cost(plan: RunPlan) -> tuple[float, str] | None:
    """Return how long a reference will train and whose speed tells it; None where nothing tells this machine's.

    Speed is the highest that a run or a reference of the comparison reached with the same model and tokens, else what
    large models reach of the device's peak, which is not known of a CPU.
    """
    folders = (plan.comparison, ComparisonFolder(plan.comparison.references))
    pattern = f"*-{plan.config.model.name}-*"
    rows = (record.row for folder in folders for record in readable_records(folder, pattern))
    peak = ASSUMED_MFU * (peak_flops(plan.machine.device_name, plan.config.precision.compute) or 0.0)
    assumed = (peak, f"{ASSUMED_MFU:.0%} of a device's peak")
    flops_per_second, source = max(measured_speeds(plan, rows), key=itemgetter(0), default=assumed)
    if not flops_per_second:
        return None
    flops = executed_flops(plan.config, plan.layout, plan.machine.device, plan.widths.recomputes_last_projection)
    return TRAININGS * plan.config.train.total_steps * (flops / devices_used(plan)) / flops_per_second, source


def measured_speeds(plan: RunPlan, rows: Iterable[Row]) -> Iterator[tuple[float, str]]:
    """Yield the operations that one device ran in a second, and the run, of those that tell something about the plan's.

    On a CPU they are those of the whole machine, which its ranks share.
    """
    alike = {
        "status": "ok",
        "measured_on": plan.machine.device_name,
        "model": plan.config.model.name,
        "precision": plan.config.precision.name,
        "seq_len": plan.config.train.seq_len,
    }
    for row in rows:
        flops, seconds = row.get("executed_flops"), row.get("step_seconds")
        if flops and seconds and all(row.get(key) == value for key, value in alike.items()):
            yield flops / seconds / (row["world_size"] if plan.machine.device == "cuda" else 1), row["run_id"]
