"""The making of a run's reference: the cheapest layout that fits, and the chain of runs that proves its training.

Any layout but a single process is first trained with fewer layers, beside a single process of as many. A layout that
does not fit, or that is too slow, is skipped with a sentence, and takes no row with it; one that fails does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from harness.config.schema import RunConfig
from harness.cost_model.flops import executed_flops
from harness.hardware.peak_flops import peak_flops
from harness.launcher.rank_entry import worker_entry
from harness.proof.reference import merge_reports
from harness.records.rank_report import RankReport
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record, Row
from harness.records.store import readable_records
from harness.runner.launch_run import RunContext, launch_run
from harness.runner.plan import RunPlan, capacity_problem
from harness.runner.reference_plans import (
    Reference,
    fewer_layers,
    is_same_layout,
    is_single_process,
    plan_reference,
    reference_configs,
)
from harness.runner.reuse import NO_REFERENCE, reusable_record
from harness.util.errors import UserError
from harness.util.locks import run_lock
from harness.util.text import count_text

SINGLE = "a single process"
ASSUMED_MFU = 0.4  # the share of the device's peak that large models reach, for devices that have timed nothing yet
TRAININGS = 2  # by a reference: its own, and one that differs from it in rounding


@dataclass(frozen=True)
class Cost:
    """The predicted duration of a run."""

    seconds: float
    source: str  # of the speed


class SlowReferenceError(UserError):
    """A reference that does not end in time, so that others on as few devices would not either."""


class OutOfMemoryReferenceError(UserError):
    """A reference that ran out of memory, although it was expected to fit."""


class FailedReferenceError(Exception):
    """A reference that failed, so that every row that is compared with it fails too, with this status and reason."""


def get_reference(plan: RunPlan, context: RunContext) -> Reference:
    """Return the run's reference, which is trained once for a comparison and then reused."""
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
        except FailedReferenceError as error:
            status, reason = error.args
            return Reference(f"none: {reason}", failure={"status": status, "reason": reason})
    return Reference(f"none: {'; '.join(problems)}")


def layout_text(config: RunConfig) -> str:
    """Return the name of a reference's layout in a sentence."""
    ranks = f"{config.strategy.name} on {count_text(config.world_size, 'rank')}" if config.world_size else SINGLE
    offload = "" if config.strategy.offload == "none" else f" with strategy.offload={config.strategy.offload}"
    checkpointing = "" if config.checkpointing.name == "none" else f" with checkpointing={config.checkpointing.name}"
    return ranks + offload + checkpointing


def devices_used(plan: RunPlan) -> int:
    """Return the number of devices that a run uses; on a CPU the machine is one device, whose cores ranks share."""
    return plan.layout.world_size if plan.machine.device == "cuda" else 1


def prove_reference(plan: RunPlan, context: RunContext) -> Reference:
    """Return the reference of this plan, trained after its layout was proven with fewer layers.

    Raises UserError if it does not fit or is too slow, and FailedReferenceError if it or its proof fails.
    """
    if stored_record(plan) is None:
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


def train_reference(plan: RunPlan, context: RunContext, compared: Reference) -> Reference:
    """Return the run of this plan, compared with another one; it is made unless it is recorded with that comparison.

    Raises SlowReferenceError, OutOfMemoryReferenceError or FailedReferenceError.
    """
    with run_lock(plan.folder.lock):
        record, ranks = stored_record(plan), read_reports(plan)
        is_compared = compared.report is None or (record and record.proof.get("reference") == compared.note)
        if record is None or (record.status == "ok" and not (is_compared and ranks)):
            cost = refuse_slow(plan)
            context.log(f"reference {plan.run_id}{cost}")
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


def stored_record(plan: RunPlan) -> Record | None:
    """Return the record of a reference that need not be trained again."""
    return reusable_record(plan.config, plan.command, plan.folder, lambda _: None)


def refuse_slow(plan: RunPlan) -> str:
    """Return what the log says of the predicted duration; raise SlowReferenceError if it is beyond timeout_seconds."""
    cost = predict_cost(plan)
    if cost is None:
        return ""
    text = f"train for {cost.seconds:,.0f} s at the speed of {cost.source}"
    if cost.seconds > plan.command.timeout_seconds:
        raise SlowReferenceError(f"it would {text}, and timeout_seconds={plan.command.timeout_seconds:g}")
    return f", predicted to {text}"


def read_reports(plan: RunPlan) -> list[RankReport]:
    """Return the reports of all ranks of a reference; none if one is missing or damaged."""
    try:
        ranks = plan.folder.read_rank_reports(plan.layout.world_size)
    except ValueError:
        return []
    return ranks if len(ranks) == plan.layout.world_size else []


def predict_cost(plan: RunPlan) -> Cost | None:
    """Return how long a reference will train; None where nothing tells the speed of this machine.

    Speed is the highest that a run or a reference of the comparison reached with the same model and tokens, else what
    large models reach of the device's peak, which is not known of a CPU.
    """
    folders = (plan.comparison, ComparisonFolder(plan.comparison.references))
    pattern = f"*-{plan.config.model.name}-*"
    rows = (record.row for folder in folders for record in readable_records(folder, pattern))
    flops_per_second, source = max(measured_speeds(plan, rows), key=itemgetter(0), default=(0.0, ""))
    if not flops_per_second:
        peak = peak_flops(plan.machine.device_name, plan.config.precision.compute)
        if peak is None:
            return None
        flops_per_second, source = ASSUMED_MFU * peak, f"{ASSUMED_MFU:.0%} of a device's peak"
    device = plan.machine.device
    flops = executed_flops(plan.config, plan.layout, device, plan.widths.recomputes_last_projection)
    per_device = flops / (plan.layout.world_size if device == "cuda" else 1)
    return Cost(TRAININGS * plan.config.train.total_steps * per_device / flops_per_second, source)


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
