"""Pruning of runs that cannot fit, because the same layout ran out of memory at a smaller batch or depth.

The pruned run must need at least as much memory by the cost model. Both runs have the same memory budget, because they
are equal in everything but their sizes.
"""

import json
from collections.abc import Iterator
from typing import Literal

from harness.config.fingerprint import result_affecting_keys
from harness.config.from_dict import ConfigValues
from harness.records.provenance import version_differences, versions
from harness.records.schema import Record, Row
from harness.records.store import readable_records
from harness.runner.plan import RunPlan
from harness.util.files import JsonObject

# What may differ between two comparable runs, by group: the sizes that grow, and what follows from them.
_SIZES = {"train": ("micro_batch", "global_batch"), "model": ("num_hidden_layers", "parameters")}

Size = tuple[Literal["model", "train"], str]  # a group and its key

_GROWING: tuple[Size, ...] = (("model", "num_hidden_layers"), ("train", "micro_batch"))


def pruning_reason(plan: RunPlan) -> str | None:
    """Return which measured run shows that this one cannot fit, in one line, or None if there is none."""
    if not plan.command.sweep.skip_dominated or plan.command.force:
        return None
    values = plan.config.to_dict()
    for record in comparable_oom_records(plan):
        row = record.row
        if row["measured_on"] != plan.machine.device_name:
            continue
        grown = grown_sizes(record.config, values)
        if grown and needs_at_least(plan, row):
            smaller = " and ".join(f"{group}.{key}={record.config[group][key]}" for group, key in grown)
            larger = " and ".join(f"{group}.{key}={values[group][key]}" for group, key in grown)
            return (
                f"not tried: {row['run_id']} ran out of memory at {smaller} with the same layout, and {larger} needs no"
                " less; sweep.skip_dominated=false tries it"
            )
    return None


def comparable_oom_records(plan: RunPlan) -> Iterator[Record]:
    """Yield the records of runs of these versions that ran out of memory and differ from the plan in sizes alone."""
    names = plan.run_id.rpartition("-")[0]
    wanted = without_sizes(plan.config.to_dict())
    for record in readable_records(plan.folder.comparison, f"{names}-*"):
        is_comparable = record.status == "oom" and not version_differences(record, versions())
        if is_comparable and without_sizes(record.config) == wanted:
            yield record


def without_sizes(values: ConfigValues) -> JsonObject:
    """Return the values that affect a run's result, except its sizes and its repeat, in the types that JSON has."""
    affecting = result_affecting_keys(values)
    for group, names in _SIZES.items():
        affecting[group] = {key: value for key, value in affecting[group].items() if key not in names}
    plain: JsonObject = json.loads(json.dumps(affecting | {"repeat": 0}))  # if one repeat ran out of memory, all would
    return plain


def grown_sizes(before: ConfigValues, after: ConfigValues) -> list[Size]:
    """Return the group and key of every size that is larger than before; none if any is smaller."""
    pairs = {(group, key): (before[group][key], after[group][key]) for group, key in _GROWING}
    if any(new < old for old, new in pairs.values()):
        return []
    return [key for key, (old, new) in pairs.items() if new > old]


def needs_at_least(plan: RunPlan, row: Row) -> bool:
    """Return whether the cost model predicts as much memory as for the run of this row.

    It may predict less: a pipeline's larger micro-batches can be fewer.
    """
    predicted = row.get("predicted_peak_bytes")
    if predicted is None:  # nothing is predicted for compiled layers
        return not plan.layout.pp_enabled
    return plan.memory.peak_bytes >= int(predicted)
