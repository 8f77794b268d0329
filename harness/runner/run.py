"""One run from its plan to its record: reused, refused, or launched and proven.

A run is refused if it cannot fit, because the same layout ran out of memory at a smaller batch or depth. It must then
need at least as much memory by the cost model. Both have the same memory budget, because they are equal in everything
but their sizes.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

from harness.config.fingerprint import result_affecting_keys
from harness.config.from_dict import ConfigValues
from harness.records.provenance import version_differences
from harness.records.schema import Cells, Record, Row
from harness.records.store import readable_records
from harness.runner.launch_run import RunContext, launch_run, write_row
from harness.runner.plan import RunPlan, capacity_problem
from harness.runner.reference_runs import FailedReferenceError, get_reference
from harness.runner.resolve import refresh_machine
from harness.runner.reuse import reusable_record, stored_rejection
from harness.util.files import JsonObject
from harness.util.locks import file_lock

# What may differ between two comparable runs, by group: the sizes that grow, and what follows from them.
_SIZES = {"train": ("micro_batch", "global_batch"), "model": ("num_hidden_layers", "parameters")}

_GROWING = (("model", "num_hidden_layers"), ("train", "micro_batch"))  # groups and their keys


def execute(plan: RunPlan, context: RunContext) -> Record | None:
    """Return the run's record: the stored one if it can be reused, else a new one.

    Return None if another command is working on the run. Raises OSError if the disk is too full even for the
    record of that failure.
    """
    with file_lock(plan.folder.lock, wait=False) as is_acquired:
        return run_locked(plan, context) if is_acquired else None


def run_locked(plan: RunPlan, context: RunContext) -> Record:
    """Return the run's record as execute() does. The caller holds the run's lock."""
    record = reusable_record(plan.command, plan.folder, context.log)
    if record is not None:
        return record
    if plan.config.launch != "simulated":  # which needs no memory of the machine, and finds out by itself what fits
        plan = replace(plan, machine=refresh_machine(plan.machine, plan.config.cluster))
        reason = capacity_problem(plan, context.models) or pruning_reason(plan)
        if reason:  # a stored refusal stays, even if its figures differ
            stored = stored_rejection(plan.folder, plan.command.force)
            return stored or write_row(plan, {"status": "refused", "reason": reason})
    try:
        reference = get_reference(plan, context)
    except FailedReferenceError as error:
        status, reason, from_outside = error.args
        ending: Cells = {"status": status, "reason": reason, "reference": f"none: {reason}"}
        return write_row(plan, ending | {"ended_from_outside": from_outside})
    return launch_run(plan, context, reference)


def pruning_reason(plan: RunPlan) -> str | None:
    """Return which measured run shows that this one cannot fit, in one line, or None if there is none."""
    if not plan.command.sweep.skip_dominated or plan.command.force:
        return None
    values = plan.config.to_dict()
    for record in comparable_oom_records(plan):
        grown = grown_sizes(record.config, values)
        if grown and needs_at_least(plan, record.row):
            smaller, larger = (
                " and ".join(f"{group}.{key}={sizes[group][key]}" for group, key in grown)
                for sizes in (record.config, values)
            )
            return (
                f"not tried: {record.run_id} ran out of memory at {smaller} with the same layout, and {larger} needs no"
                " less; sweep.skip_dominated=false tries it"
            )
    return None


def comparable_oom_records(plan: RunPlan) -> Iterator[Record]:
    """Yield the records of runs of these versions that ran out of memory and differ from the plan in sizes alone."""
    names = plan.run_id.rpartition("-")[0]
    wanted = without_sizes(plan.config.to_dict())
    for record in readable_records(plan.folder.comparison, f"{names}-*"):
        is_alike = record.status == "oom" and record.row.get("measured_on") == plan.machine.device_name
        if is_alike and not version_differences(record) and without_sizes(record.config) == wanted:
            yield record


def without_sizes(values: ConfigValues) -> JsonObject:
    """Return the values that affect a run's result, except its sizes and its repeat, in the types that JSON has."""
    affecting = result_affecting_keys(values)
    for group, names in _SIZES.items():
        affecting[group] = {key: value for key, value in affecting[group].items() if key not in names}
    plain: JsonObject = json.loads(json.dumps(affecting | {"repeat": 0}))  # if one repeat ran out of memory, all would
    return plain


def grown_sizes(before: ConfigValues, after: ConfigValues) -> list[tuple[str, str]]:
    """Return the group and key of every size that is larger than before; none if any is smaller."""
    growth = {(group, key): after[group][key] - before[group][key] for group, key in _GROWING}
    return [] if min(growth.values()) < 0 else [size for size, difference in growth.items() if difference > 0]


def needs_at_least(plan: RunPlan, row: Row) -> bool:
    """Return whether the cost model predicts as much memory as for the run of this row.

    It may predict less: a pipeline's larger micro-batches can be fewer.
    """
    predicted = row.get("predicted_peak_bytes")
    if predicted is None:  # nothing is predicted for compiled layers
        return not plan.layout.pp_enabled
    return plan.memory.peak_bytes >= int(predicted)
