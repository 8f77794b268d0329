"""The data of a run that a tracker receives, read from the run's folder: plain values only, and no secrets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.command import TrackingConfig
from harness.records import heartbeat
from harness.records.columns import COLUMN_NAMES
from harness.records.run_folder import RunFolder
from harness.records.schema import Record, StepEntry
from harness.tracking.base import Scalar, TrackedRun, Values
from harness.util.redact import redacted

MAX_LISTED_RANKS = 8  # live figures list so many ranks one by one; of more ranks only the extremes are logged

TAG_GROUPS = ("strategy", "model", "checkpointing", "precision")  # their names become tags

RECORD_KEYS = ("layout", "environment", "versions", "commit")  # keys of a record that join the tracker's configuration


def started_run(run_dir: Path, id: str, config: Values, tracking: TrackingConfig) -> TrackedRun:
    """Return the tracked run of a run that has started, when only its configuration is known."""
    names = [str((config.get(group) or {}).get("name")) for group in TAG_GROUPS]
    return TrackedRun(id, run_dir.name, run_dir.parent.name, run_dir, redacted(dict(config)), (*names, *tracking.tags))


def finished_run(run_dir: Path, id: str, record: Record, tracking: TrackingConfig) -> TrackedRun:
    """Return the tracked run of a record, with the status among its tags."""
    row, values = record.row, record.to_json()
    config = {**record.config, **{key: values.get(key) for key in RECORD_KEYS}}
    names = [str(row[column]) for column in (*TAG_GROUPS, "status") if row.get(column)]
    return TrackedRun(id, row["run_id"], run_dir.parent.name, run_dir, redacted(config), (*names, *tracking.tags))


def step_values(run_dir: Path) -> list[StepEntry]:
    """Return index, phase, loss, gradient norm and seconds of every step; empty if the run did not train to its end."""
    path = RunFolder(run_dir).steps
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def live_figures(run_dir: Path) -> dict[str, Scalar]:
    """Return what the heartbeats of a running run say: the least step, the most bytes, and a few ranks one by one."""
    rank_count = len(RunFolder(run_dir).heartbeats())
    newest = {rank: heartbeat.read_heartbeat(run_dir, rank) for rank in range(rank_count)}
    beats = {rank: beat for rank, beat in newest.items() if beat is not None}
    if not beats:
        return {}
    last = min(beats.values(), key=lambda beat: beat.step)
    figures: dict[str, Scalar] = {"step": last.step, "phase": last.phase}
    for column in ("allocated_bytes", "host_bytes"):
        sizes = {rank: getattr(beat, column) for rank, beat in beats.items() if getattr(beat, column) is not None}
        if sizes:
            figures[column] = max(sizes.values())
        figures |= {f"rank_{rank}/{column}": size for rank, size in sizes.items() if rank < MAX_LISTED_RANKS}
    for rank, beat in beats.items():
        if rank < MAX_LISTED_RANKS:
            figures |= {f"rank_{rank}/step": beat.step, f"rank_{rank}/phase": beat.phase}
    return figures


def table_rows(records: list[Record]) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the columns in which any row of a comparison has a value, declared ones first, and the rows."""
    rows = [redacted(record.row) for record in records]
    filled = {column: None for row in rows for column, value in row.items() if value not in (None, "")}
    columns = [column for column in COLUMN_NAMES if column in filled]
    return columns + [column for column in filled if column not in columns], rows
