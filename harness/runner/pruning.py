"""What need not be tried: the same layout ran out of memory at a smaller batch or depth, and this needs no less.

Under the same memory budget, which like all else that affects a run is the same where two runs are alike.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.config.fingerprint import result_affecting_keys
from harness.config.schema import RunConfig
from harness.cost_model.memory import estimate
from harness.hardware.machine import Machine
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.records.provenance import version_differences, versions
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import read_record
from harness.util.errors import UserError

# What may differ between two runs that are alike, by group: what follows from the sizes, and the sizes that grow.
_OF_SIZE = {"train": ("micro_batch", "global_batch"), "model": ("num_hidden_layers", "parameters")}

_GROWING = (("model", "num_hidden_layers"), ("train", "micro_batch"))


def pruning_reason(
    config: RunConfig, layout: Layout, widths: StateWidths, machine: Machine, run_dir: Path
) -> str | None:
    """Which measured run says that this one cannot fit, in one line; None if there is none."""
    if not config.sweep.skip_dominated or config.force:
        return None
    for record in comparable_oom_records(config, run_dir):
        row = record["row"]
        if row["measured_on"] != machine.device_name:
            continue
        grown = grown_sizes(record["config"], config.to_dict())
        if grown and needs_at_least(config, layout, widths, machine.device, row):
            smaller = (f"{group}.{key}={record['config'][group][key]}" for group, key in grown)
            this = (f"{group}.{key}={getattr(getattr(config, group), key)}" for group, key in grown)
            return (
                f"not tried: {row['run_id']} ran out of memory at {' and '.join(smaller)} with the same layout, and"
                f" {' and '.join(this)} needs no less; sweep.skip_dominated=false tries it"
            )
    return None


def comparable_oom_records(config: RunConfig, run_dir: Path) -> Iterator[Record]:
    """The records of the comparison that this code made out of memory, and that differ from this run in size alone."""
    names = run_dir.name.rpartition("-")[0]
    for folder in ComparisonFolder(run_dir.parent).recorded_runs(f"{names}-*"):
        try:
            record = read_record(folder.path)
        except UserError:
            continue
        if record["row"]["status"] != "oom" or version_differences(record, versions()):
            continue
        if without_sizes(record["config"]) == without_sizes(config.to_dict()):
            yield record


def without_sizes(values: dict[str, Any]) -> dict[str, Any]:
    kept = result_affecting_keys(values)
    for group, names in _OF_SIZE.items():
        kept[group] = {key: value for key, value in kept[group].items() if key not in names}
    # As a record has it, lists for tuples; whichever repeat ran out of memory, the others would.
    plain: dict[str, Any] = _as_read(kept | {"repeat": 0})
    return plain


def grown_sizes(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str]]:
    """In which sizes the other is larger; none if it is smaller in any."""
    pairs = {(group, key): (one[group][key], other[group][key]) for group, key in _GROWING}
    if any(after < before for before, after in pairs.values()):
        return []
    return [key for key, (before, after) in pairs.items() if after > before]


def _as_read(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_read(entry) for key, entry in value.items()}
    return [_as_read(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def needs_at_least(config: RunConfig, layout: Layout, widths: StateWidths, device: str, row: dict[str, Any]) -> bool:
    """By the plan as much memory as the run of that row: a pipeline's larger micro-batches can be fewer."""
    predicted = row.get("predicted_peak_bytes")
    if predicted is None:  # of compiled layers nothing is predicted
        return layout.pp == 1
    needed: int = estimate(config, layout, widths, device).peak_bytes
    return needed >= int(predicted)
