"""One run from its plan to its record: reused, refused, or launched and proven."""

import dataclasses

from harness.proof.simulation import NO_REFERENCE
from harness.records.schema import Record
from harness.runner.launch_run import RunContext, launch_run, write_row
from harness.runner.local_machine import refresh_machine
from harness.runner.plan import RunPlan, capacity_problem
from harness.runner.pruning import pruning_reason
from harness.runner.reference_plans import Reference
from harness.runner.reference_runs import get_reference
from harness.runner.reuse import reusable_record, stored_rejection
from harness.util.locks import run_lock


def execute(plan: RunPlan, context: RunContext) -> Record | None:
    """Return the run's record: the stored one if it can be reused, else a new one.

    Return None if another command is working on the run. Raises OSError if the disk is too full even for the
    record of that failure.
    """
    with run_lock(plan.folder.lock, wait=False) as is_acquired:
        return run_locked(plan, context) if is_acquired else None


def run_locked(plan: RunPlan, context: RunContext) -> Record:
    """Return the run's record as execute() does. The caller holds the run's lock."""
    record = reusable_record(plan.config, plan.command, plan.folder, context.log)
    if record is not None:
        return record
    if plan.config.launch == "simulated":  # it needs no memory of the machine, and finds out by itself what fits
        return launch_run(plan, context, Reference(NO_REFERENCE["simulated"]))
    plan = dataclasses.replace(plan, machine=refresh_machine(plan.machine, plan.config.cluster))
    reason = capacity_problem(plan, context.models) or pruning_reason(plan)
    if reason:
        return reject(plan, reason)
    if plan.config.launch == "virtual":
        return launch_run(plan, context, Reference(NO_REFERENCE["virtual"]))
    reference = get_reference(plan, context)
    if reference.failure is not None:
        return write_row(plan, reference.failure | reference.columns)
    return launch_run(plan, context, reference)


def reject(plan: RunPlan, reason: str) -> Record:
    """Return the record of a refused run: the stored refusal, even if its figures differ, or else a new one."""
    stored = stored_rejection(plan.folder, plan.command.force)
    return stored or write_row(plan, {"status": "refused", "reason": reason})
