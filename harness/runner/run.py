"""One run from its configuration to its record: planned, refused or launched, proven, written down."""

import dataclasses

from harness.records.run_folder import RunFolder
from harness.records.schema import Record
from harness.runner.context import RunContext
from harness.runner.launch_run import start_run, write_row
from harness.runner.local_machine import refresh_machine
from harness.runner.plan import Plan, capacity_problem
from harness.runner.pruning import pruning_reason
from harness.runner.reference import get_reference
from harness.runner.reuse import reusable_record, stored_rejection
from harness.util.locks import run_lock


def execute(this: Plan, means: RunContext) -> Record | None:
    """The run's record: the one on file if that stands, else a new one. None: another command is at it.

    Raises OSError if not even the row of a full disk can be written.
    """
    with run_lock(RunFolder(this.directory).lock, wait=False) as is_mine:
        return run_locked(this, means) if is_mine else None


def run_locked(this: Plan, means: RunContext) -> Record:
    """As execute(), with nobody else at this run."""
    record = reusable_record(this.config, this.directory, means.log)
    if record is not None:
        return record
    this = dataclasses.replace(this, machine=refresh_machine(this.machine, this.config.cluster))
    why_not = capacity_problem(this, means.models) or pruning_reason(
        this.config, this.layout, this.widths, this.machine, this.directory
    )
    if why_not:
        return reject(this, why_not)
    reference = get_reference(this, means)
    if reference.failure is not None:
        return write_row(this, reference.failure)
    return start_run(this, means, reference)


def reject(this: Plan, reason: str) -> Record:
    """The row that says so; the one on file if that is still a refusal, whatever the figures of the moment."""
    return stored_rejection(this.directory, this.config.force) or write_row(
        this, {"status": "refused", "reason": reason}
    )
