"""The reference of a run: the first layout that fits at little cost, and the chain of runs that proves its training.

It is a single process; where it does not fit, a single process with full checkpointing; ranks that shard everything
besides; and on a GPU such ranks whose model state is on the host. Any layout but a single process is first trained with
fewer layers, beside a single process of as many. Where that costs too much, all of them train fewer steps than the run.
A layout that does not fit, or that is too slow, is skipped with a sentence, and takes no row with it; one that fails
does.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from harness.config.schema import CheckpointingConfig
from harness.launcher.rank_entry import worker_entry
from harness.proof import simulation
from harness.proof.reference import merge_reports
from harness.records.rank_report import RankReport
from harness.records.store import readable_records
from harness.runner.launch_run import RunContext, launch_run
from harness.runner.plan import RunPlan, capacity_problem
from harness.runner.record import Reference
from harness.runner.reference_cost import (
    OTHER_SECONDS,
    Speed,
    device_flops,
    devices_used,
    measured_speed,
    predict_cost,
)
from harness.runner.reference_layouts import (
    is_own_layout,
    is_single_process,
    layout_text,
    plan_reference,
    reference_configs,
    single_process,
)
from harness.runner.resolve import with_layers
from harness.runner.reuse import NO_REFERENCE, reusable_record
from harness.util.locks import file_lock
from harness.util.text import UserError, count_text

CHEAP_SECONDS = 120.0  # of training that a reference may always take, however short its run is
LEAST_LAYERS = 2  # that a single process has even if they are not cheap: with one, no layer follows another
TRAINING_SHARE = 0.5  # of timeout_seconds: the rest is for start and measurement, and for slower steps than predicted
UNKNOWN = "of unknown duration"


class SlowReferenceError(UserError):
    """A reference that does not end in time, so that none with as much work for each device would either."""


class OutOfMemoryReferenceError(UserError):
    """A reference that ran out of memory, although it was expected to fit."""


class FailedReferenceError(Exception):
    """A reference that failed, so that every row that is compared with it fails too, with this status and reason."""


@dataclass(frozen=True)
class Chain:
    """A reference, and what is trained before it: a single process with fewer layers, and its own layout with as many.

    Nothing is trained before a single process with all layers.
    """

    plan: RunPlan
    shallower: Sequence[RunPlan]
    costs: Sequence[tuple[int, float]]  # of those that are not recorded: devices and predicted seconds, 0 if unknown

    @property
    def longest_seconds(self) -> float:
        """The seconds of the run that trains longest."""
        return max((seconds for _, seconds in self.costs), default=0.0)

    @property
    def announcement(self) -> str:
        """What the log says before the chain is trained."""
        each = ", ".join(f"{seconds:,.0f} s on {count_text(devices, 'device')}" for devices, seconds in self.costs)
        other = OTHER_SECONDS[self.plan.machine.device]
        total = sum(other + seconds for _, seconds in self.costs)
        known = f"predicted to take {total:,.0f} s: {each}, and {other:g} s of each for start and measurement"
        return f"{len(self.costs)} references before this run, {known if self.longest_seconds else UNKNOWN}"


def get_reference(plan: RunPlan, context: RunContext) -> Reference:
    """Return the run's reference, which is trained once for a comparison and then reused.

    Raises FailedReferenceError if it or its proof fails.
    """
    if plan.config.launch in simulation.NO_REFERENCE:
        return Reference(simulation.NO_REFERENCE[plan.config.launch])
    if not plan.command.proof.reference:
        return Reference(NO_REFERENCE)
    if plan.widths.quantizes_gathers:
        return Reference("none: parameters rounded to 8 bits are not those of another training")
    if plan.config.model.dropout:
        return reference_that_drops_alike(plan, context)
    problems: dict[str, UserError] = {}
    slow_flops = math.inf  # of a device
    for chain in possible_chains(plan, problems):
        if device_flops(chain.plan) < slow_flops:
            try:
                return for_run(prove_reference(chain, context), chain.plan, plan)
            except UserError as error:
                problems[layout_text(chain.plan.config)] = error
                if isinstance(error, SlowReferenceError):
                    slow_flops = device_flops(chain.plan)
    return Reference(
        "none: "
        + "; ".join(
            f"{layout} {'is too slow' if isinstance(error, SlowReferenceError) else 'cannot be run'}: {error}"
            for layout, error in problems.items()
        )
    )


def reference_that_drops_alike(plan: RunPlan, context: RunContext) -> Reference:
    """Return the reference of a run with dropout: its own layout without checkpointing, which draws the same masks."""
    dropout, plain = plan.config.model.dropout, replace(plan.config, checkpointing=CheckpointingConfig("none"))
    if plain == plan.config:
        return Reference(f"none: no other run drops the same values with model.dropout={dropout}")
    candidate = plan_reference(plain, plan)
    try:
        if refusal := capacity_problem(candidate, ()):
            raise UserError(refusal.partition(": choose ")[0])
        return for_run(train_reference(candidate, context, Reference(NO_REFERENCE)), candidate, plan)
    except UserError as error:
        return Reference(f"none: only checkpointing=none drops the same values with model.dropout={dropout}: {error}")


def possible_chains(plan: RunPlan, problems: dict[str, UserError]) -> Iterator[Chain]:
    """Yield the chains of references that a run may be compared with, in the order in which they are tried.

    Those of the run's own layout are the last choice. Before others come those that were begun, as every record changes
    what is predicted. The rest of the order is that of reference_configs() among those that are cheap, and the cheapest
    comes first among the others. `problems` receives what keeps a layout from being a reference.
    """
    measured = measured_speed(plan)
    cheap_seconds = max(CHEAP_SECONDS, predict_cost(plan, measured)[0])
    for group in product((False, True), (True, False)):
        chains: list[Chain] = []
        for config, steps in product(reference_configs(plan), dict.fromkeys((plan.config.train.steps, 1))):
            try:
                candidate = plan_reference(replace(config, train=replace(config.train, steps=steps)), plan)
                is_begun = not is_single_process(candidate) and recorded_layers(candidate)[0]
                if group == (is_own_layout(candidate, plan), is_begun or candidate.folder.record.exists()):
                    chains.append(find_chain(candidate, cheap_seconds, measured))
            except UserError as error:
                problems[layout_text(config)] = error
        yield from sorted(chains, key=lambda chain: max(cheap_seconds, chain.longest_seconds))


def for_run(reference: Reference, plan: RunPlan, run: RunPlan) -> Reference:
    """Return the reference of this plan as a run is compared with it: what only one of both trained is left out."""
    note, report = reference.note, reference.report
    steps, all_steps = plan.config.train.total_steps, run.config.train.total_steps
    if report is not None and steps < all_steps:  # so that its last gradients are those of an earlier step
        note = f"{note}; only the first {steps} of {all_steps} steps were compared"
        perturbed = report.perturbed and replace(report.perturbed, last_gradients=())
        report = replace(report, last_gradients=(), perturbed=perturbed)
    if is_own_layout(plan, run):
        note = f"{note}; it has the same layout and engine as this run"
    return replace(reference, note=note, report=report)


def prove_reference(chain: Chain, context: RunContext) -> Reference:
    """Return the reference of this chain, trained after its layout was proven with fewer layers.

    A single process that is too large or too slow after all is followed by one with half as many layers. Raises
    UserError if the reference or every single process is, and FailedReferenceError if one of the runs or its proof
    fails.
    """
    if len(chain.costs) > 1:
        context.log(chain.announcement)
    if not chain.shallower:
        return train_reference(chain.plan, context, Reference(NO_REFERENCE))
    single, shallow = chain.shallower
    layers, all_layers = (run.config.model.num_hidden_layers for run in (single, chain.plan))
    try:
        root = train_reference(single, context, Reference(NO_REFERENCE))
    except (OutOfMemoryReferenceError, SlowReferenceError):
        if layers == 1:
            raise
        return prove_reference(Chain(chain.plan, shallower_runs(chain.plan, layers // 2), ()), context)
    shallow_run = train_reference(shallow, context, root)
    proof = f"its layout was compared on {layers} of {all_layers} layers with {single.run_id}"
    reference = train_reference(chain.plan, context, Reference(f"none: {proof}"))
    seconds = root.seconds + shallow_run.seconds + reference.seconds
    return replace(reference, note=f"{reference.note}; {proof}", seconds=seconds, shallower=root)


def find_chain(plan: RunPlan, cheap_seconds: float, measured: Speed) -> Chain:
    """Return the chain of a reference. Raises UserError if it does not fit, SlowReferenceError if it is too slow."""
    shallower = () if is_single_process(plan) else shallower_runs(plan, first_layers(plan, cheap_seconds, measured))
    runs = (*shallower, plan)
    missing = [run for run in runs if reusable_record(run.command, run.folder) is None]
    for run in reversed(missing):
        refusal = capacity_problem(run, ())
        if refusal:
            first = "" if run is plan else f"{layout_text(run.config)} with its first layers cannot be run: "
            raise UserError(f"{first}{refusal.partition(': choose ')[0]}")
        refuse_slow(run, measured)
    return Chain(plan, shallower, [(devices_used(run), predict_cost(run, measured)[0]) for run in missing])


def shallower_runs(plan: RunPlan, layers: int) -> Sequence[RunPlan]:
    """Return a single process with so many layers of a reference's model, and the reference's layout with as many."""
    shallow = with_layers(plan.config, layers)
    return plan_reference(single_process(shallow), plan), plan_reference(shallow, plan)


def first_layers(plan: RunPlan, cheap_seconds: float, measured: Speed) -> int:
    """Return with how many layers, fewer than all, a reference's layout is compared with a single process.

    They are those that are recorded, since what fits varies with the memory that is free, and what is cheap with every
    record; else the most that are predicted to fit and to be cheap. Raises UserError if there is one layer only.
    """
    all_layers = plan.config.model.num_hidden_layers

    def is_too_deep(layers: int) -> bool:
        single, _ = shallower_runs(plan, layers)
        limit = min(cheap_seconds if layers > LEAST_LAYERS else math.inf, TRAINING_SHARE * plan.command.timeout_seconds)
        predicted = replace(single, command=replace(single.command, preflight=True))
        return predict_cost(single, measured)[0] > limit or capacity_problem(predicted, ()) is not None

    if all_layers == 1:
        raise UserError("it has one layer only, and nothing smaller can be compared with a single process")
    return recorded_layers(plan)[1] or max(bisect.bisect_left(range(1, all_layers), True, key=is_too_deep), 1)


def recorded_layers(plan: RunPlan) -> tuple[bool, int]:
    """Return whether a reference's layout is recorded beside a single process, and with how many layers that is.

    Without such a comparison they are the most that a single process is recorded with; 0 for none.
    """
    names, all_layers = plan_reference(single_process(plan.config), plan).run_id, plan.config.model.num_hidden_layers
    singles = readable_records(plan.folder.comparison, f"{names.rpartition('-')[0]}-*")
    layers = {record.run_id: record.config["model"]["num_hidden_layers"] for record in singles if record.status == "ok"}
    runs = [(n, run_id, *shallower_runs(plan, n)) for run_id, n in layers.items() if LEAST_LAYERS <= n < all_layers]
    same = ((shallow.folder.record.exists(), n) for n, run_id, single, shallow in runs if single.run_id == run_id)
    return max(same, default=(False, 0))


def train_reference(plan: RunPlan, context: RunContext, compared: Reference) -> Reference:
    """Return the run of this plan, compared with another one; it is made unless it is recorded with that comparison.

    Raises SlowReferenceError, OutOfMemoryReferenceError or FailedReferenceError.
    """
    with file_lock(plan.folder.lock):
        record, ranks = reusable_record(plan.command, plan.folder), read_reports(plan)
        is_compared = compared.report is None or (record and record.proof.get("reference") == compared.note)
        if record is None or (record.status == "ok" and not (is_compared and ranks)):
            context.log(f"reference {plan.run_id}, {refuse_slow(plan, measured_speed(plan))}")
            record = launch_run(plan, replace(context, entry=worker_entry), compared)
            ranks = read_reports(plan)
    reason = record.row["reason"]
    if record.status == "oom":
        raise OutOfMemoryReferenceError(f"it ran out of memory: {reason}")
    if record.status == "timeout":
        raise SlowReferenceError(f"it ran into a time limit: {reason}")
    if record.status != "ok" or not ranks:
        if record.status == "interrupted":
            reason = f"stopped during its reference {plan.run_id}: the same command goes on"
        else:
            reason = f"the reference {plan.run_id} failed, and nothing else proves this run: {reason}"
        from_outside = record.row.get("ended_from_outside")
        raise FailedReferenceError("error" if record.status == "ok" else record.status, reason, from_outside)
    return Reference(f"compared with {plan.run_id}", plan, merge_reports(ranks), record.row["duration_seconds"])


def refuse_slow(plan: RunPlan, measured: Speed) -> str:
    """Return what the log says of the predicted duration; raise SlowReferenceError if it is too long."""
    (seconds, source), limit = predict_cost(plan, measured), plan.command.timeout_seconds
    text = f"train for {seconds:,.0f} s at the speed of {source}"
    if seconds > TRAINING_SHARE * limit:
        raise SlowReferenceError(f"it would {text}, more than {TRAINING_SHARE:.0%} of timeout_seconds={limit:g}")
    return f"predicted to {text}" if seconds else f"{UNKNOWN}, up to timeout_seconds={limit:g}"


def read_reports(plan: RunPlan) -> list[RankReport]:
    """Return the reports of all ranks of a reference; none if one is missing or damaged."""
    try:
        ranks = plan.folder.read_rank_reports(plan.layout.world_size)
    except UserError:
        return []
    return ranks if len(ranks) == plan.layout.world_size else []
