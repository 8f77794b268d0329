"""The invariants of every finished row: its parts add up to the whole, in memory, time and bytes."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from harness.cost_model.parts import STEP_PARTS
from harness.metrics.memory import at_peak_columns
from harness.proof.layout import box_numel
from harness.records.rank_report import RankReport
from harness.records.run_folder import RunFolder
from harness.records.schema import Record
from harness.tensors.shard import GATHERED

STANDING_BYTES = 64 * 1024  # rotary tables, losses and counters, which have no role between steps

# Python's time between phases, for steps so short that 2 % of them is less. A rank that shares its core with others
# loses several of the kernel's time slices there; the median over rows is the tighter bound.
GLUE_SECONDS = 0.1


def check_peak(row: dict[str, Any], tolerance: float) -> None:
    """Check that a plan's peak is the measured one, within this share of it.

    The threads of gloo may free its copies late, so that they are left out of the upper bound.
    """
    planned, measured = row["predicted_peak_bytes"], row["peak_allocated_bytes"]
    assert (row["peak_without_backend_bytes"] or measured) < (1 + tolerance) * planned, row["run_id"]
    assert measured > (1 - tolerance) * planned, row["run_id"]


def check_memory(row: dict[str, Any], ranks: Sequence[RankReport]) -> None:
    """Check every rank's peak to the byte, and that the state at the peak is the state at rest."""
    label = row["run_id"]
    parts = {name: size for name, size in row.items() if name.startswith("at_peak_")}
    assert sum(parts.values()) == row["peak_allocated_bytes"], label
    assert all(size >= 0 for size in parts.values()), (label, parts)
    for rank in ranks:
        columns, profiled = at_peak_columns(rank), rank.profiled
        whole = sum(size for name, size in columns.items() if name.endswith("_bytes"))
        assert whole == rank.peak_allocated_bytes, label
        assert columns["at_peak_unmatched_bytes"] == columns["at_peak_rounding_bytes"] == 0, (label, columns)
        whole_at_rest = sum(box_numel(shard.box) for shard in rank.parameter_shards if shard.state_name == GATHERED)
        at_rest = rank.parameter_bytes - 4 * whole_at_rest
        assert columns["at_peak_parameter_bytes"] == at_rest, (label, columns)
        assert columns["at_peak_optimizer_bytes"] == rank.optimizer_bytes, (label, columns)
        assert columns["at_peak_activation_bytes"] <= profiled.activation_bytes, (label, columns)
        assert columns["peak_phase"] != "between", label
        unnamed = [part for part in profiled.at_peak.parts if part.what == "allocated before the step"]
        assert sum(part.bytes for part in unnamed) < STANDING_BYTES, (label, unnamed)


def check_time(row: dict[str, Any]) -> float:
    """Check that the parts add up to the step; return the share that no phase accounts for.

    The median of this share over rows must be below 2 %.
    """
    parts = {name: row[name] for name in STEP_PARTS}
    assert sum(parts.values()) == pytest.approx(row["step_seconds"]), row["run_id"]
    assert all(seconds >= 0 for seconds in parts.values()), (row["run_id"], parts)
    assert parts["other_seconds"] <= max(0.02 * row["step_seconds"], GLUE_SECONDS), (row["run_id"], parts)
    assert all(parts[f"{name}_seconds"] > 0 for name in ("data", "forward", "backward", "optimizer")), row["run_id"]
    if row["world_size"] > 1:
        assert parts["exposed_communication_seconds"] + parts["idle_seconds"] > 0, row["run_id"]
    share: float = parts["other_seconds"] / row["step_seconds"]
    return share


def check_bytes(record: Record) -> None:
    """Check that the bytes of each axis are the formula's with padding, or named, and that their sum is the row's."""
    sent = sum(entry["bytes"] + sum(entry["outside"].values()) for entry in record.traffic)
    assert round(sent) == record.row["communication_bytes"]
    for entry in record.communication:
        assert sum(entry["sizes"].values()) == entry["count"]
    if record.config["strategy"]["literature"]:
        for entry in record.traffic:
            assert entry["bytes"] == pytest.approx(entry["padded_bytes"], abs=0.5), record.run_id


def check_steps(folder: RunFolder, record: Record) -> None:
    """Check that every step is kept beside the record, with its phase, its loss and its gradient norm."""
    steps = [json.loads(line) for line in folder.steps.read_text().splitlines()]
    train = record.config["train"]
    phases = ["warm-up"] * train["warmup_steps"] + ["timed"] * train["steps"] + ["profiled", "traced", "traced"]
    assert [step["phase"] for step in steps] == phases, record.run_id
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in steps), record.run_id
