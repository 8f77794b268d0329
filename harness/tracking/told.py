"""What a tracker is told of a run, from the files in its folder: nothing but plain values, without secrets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import pulse, records
from harness.config import TrackingConfig
from harness.records import Record
from harness.redact import redacted
from harness.tracking import Scalar, Subject, Values

SHOWN_RANKS = 8  # of more the extremes alone
GROUPS = ("strategy", "model", "checkpointing", "precision")  # whose names are tags
BESIDE = ("layout", "environment", "versions", "commit")  # of a record, under a key each of the tracker's configuration


def beginning(run_dir: Path, id: str, config: Values, tracking: TrackingConfig) -> Subject:
    """A run of which only the configuration is known."""
    names = [str((config.get(group) or {}).get("name")) for group in GROUPS]
    return Subject(id, run_dir.name, run_dir.parent.name, run_dir, redacted(dict(config)), (*names, *tracking.tags))


def finished(run_dir: Path, id: str, record: Record, tracking: TrackingConfig) -> Subject:
    row = record["row"]
    config = {**(record.get("config") or {}), **{key: record.get(key) for key in BESIDE}}
    names = [str(row[column]) for column in (*GROUPS, "status") if row.get(column)]
    return Subject(id, row["run_id"], run_dir.parent.name, run_dir, redacted(config), (*names, *tracking.tags))


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """Every step's index, phase, loss, gradient norm and seconds; empty where none was trained to the end."""
    path = run_dir / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def standing(run_dir: Path) -> dict[str, Scalar]:
    """What the ranks of a live run say of themselves now: the least step, the most bytes, and each of a few ranks."""
    found = [pulse.read(run_dir, rank) for rank in range(len(list((run_dir / "ranks").glob("*.pulse"))))]
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


def table(found: list[Record]) -> tuple[list[str], list[Mapping[str, Any]]]:
    """The rows of a comparison, and the columns in which any of them has a value, known ones first."""
    rows = [redacted(record["row"]) for record in found]
    filled = {column: None for row in rows for column, value in row.items() if value not in (None, "")}
    columns = [column for column in records.COLUMNS if column in filled]
    return columns + [column for column in filled if column not in columns], rows
