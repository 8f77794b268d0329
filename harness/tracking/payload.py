"""What a tracker is told of a run, from the files in its folder: nothing but plain values, without secrets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.schema import TrackingConfig
from harness.records import heartbeat
from harness.records.schema import COLUMNS, Record
from harness.tracking.base import Scalar, TrackedRun, Values
from harness.util.redact import redacted

SHOWN_RANKS = 8  # of more the extremes alone

GROUPS = ("strategy", "model", "checkpointing", "precision")  # whose names are tags

BESIDE = ("layout", "environment", "versions", "commit")  # of a record, under a key each of the tracker's configuration


def started_run(run_dir: Path, id: str, config: Values, tracking: TrackingConfig) -> TrackedRun:
    """A run of which only the configuration is known."""
    names = [str((config.get(group) or {}).get("name")) for group in GROUPS]
    return TrackedRun(id, run_dir.name, run_dir.parent.name, run_dir, redacted(dict(config)), (*names, *tracking.tags))


def finished_run(run_dir: Path, id: str, record: Record, tracking: TrackingConfig) -> TrackedRun:
    row = record["row"]
    config = {**(record.get("config") or {}), **{key: record.get(key) for key in BESIDE}}
    names = [str(row[column]) for column in (*GROUPS, "status") if row.get(column)]
    return TrackedRun(id, row["run_id"], run_dir.parent.name, run_dir, redacted(config), (*names, *tracking.tags))


def step_values(run_dir: Path) -> list[dict[str, Any]]:
    """Every step's index, phase, loss, gradient norm and seconds; empty where none was trained to the end."""
    path = run_dir / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def live_figures(run_dir: Path) -> dict[str, Scalar]:
    """What the ranks of a live run say of themselves now: the least step, the most bytes, and each of a few ranks."""
    found = [heartbeat.read_heartbeat(run_dir, rank) for rank in range(len(list((run_dir / "ranks").glob("*.pulse"))))]
    beats = {rank: beat for rank, beat in enumerate(found) if beat is not None}
    if not beats:
        return {}
    last = min(beats.values(), key=lambda beat: beat.step)
    figures: dict[str, Scalar] = {"step": last.step, "phase": last.phase}
    for column in ("allocated_bytes", "host_bytes"):
        known = {rank: getattr(beat, column) for rank, beat in beats.items() if getattr(beat, column) is not None}
        if known:
            figures[column] = max(known.values())
        figures |= {f"rank_{rank}/{column}": size for rank, size in known.items() if rank < SHOWN_RANKS}
    for rank, beat in beats.items():
        if rank < SHOWN_RANKS:
            figures |= {f"rank_{rank}/step": beat.step, f"rank_{rank}/phase": beat.phase}
    return figures


def table_rows(found: list[Record]) -> tuple[list[str], list[Mapping[str, Any]]]:
    """The rows of a comparison, and the columns in which any of them has a value, known ones first."""
    rows = [redacted(record["row"]) for record in found]
    filled = {column: None for row in rows for column, value in row.items() if value not in (None, "")}
    columns = [column for column in COLUMNS if column in filled]
    return columns + [column for column in filled if column not in columns], rows
