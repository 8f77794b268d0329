"""The data of a run that a tracker receives, read from the run's folder: plain values only, and no secrets."""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.command import TrackingConfig
from harness.metrics.memory import max_known
from harness.records.run_folder import TRACKED, RunFolder
from harness.records.schema import COLUMNS, Record
from harness.tracking.base import Scalar, TrackedRun, Values, tracked_id
from harness.util.files import JsonObject, atomic_write_json, read_json_object
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


def step_values(run_dir: Path) -> list[JsonObject]:
    """Return index, phase, loss, gradient norm and seconds of every step; empty if the run did not train to its end."""
    path = RunFolder(run_dir).steps
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def live_figures(run_dir: Path) -> dict[str, Scalar]:
    """Return what the heartbeats of a running run say: the least step, the most bytes, and a few ranks one by one."""
    folder = RunFolder(run_dir)
    rank_count = len(list(folder.ranks.glob("*.pulse")))
    beats = {rank: beat for rank in range(rank_count) if (beat := folder.read_heartbeat(rank))}
    if not beats:
        return {}
    last = min(beats.values(), key=lambda beat: beat.step)
    figures: dict[str, Scalar | None] = {
        "step": last.step,
        "phase": last.phase,
        "allocated_bytes": max_known(beat.allocated_bytes for beat in beats.values()),
        "host_bytes": max_known(beat.host_bytes for beat in beats.values()),
    }
    for rank, beat in beats.items():
        if rank < MAX_LISTED_RANKS:
            figures |= {f"rank_{rank}/{name}": value for name, value in beat._asdict().items()}
    return {name: value for name, value in figures.items() if value is not None}


def table_rows(records: list[Record]) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the columns in which any row of a comparison has a value, declared ones first, and the rows."""
    rows = [redacted(record.row) for record in records]
    filled = {column: None for row in rows for column, value in row.items() if value not in (None, "")}
    return [column for column in dict.fromkeys((*COLUMNS, *filled)) if column in filled], rows


class SyncState(NamedTuple):
    """The part of one run, or of one comparison's summary, that one tracker has."""

    id: str  # the tracker's id of the run
    content_key: str | None = None  # record_key() or rows_key() of what the tracker has; None while a run goes on
    sent_at: str | None = None  # the UTC time at which the server had all of it; None: the server does not have it

    def has(self, content_key: str, is_online: bool) -> bool:
        """Return whether the tracker has this content, at its server if it is online."""
        return self.content_key == content_key and (self.sent_at is not None or not is_online)

    def received(self, content_key: str, is_online: bool) -> "SyncState":
        """Return the state after the tracker has received this content, at its server if it is online."""
        sent_at = datetime.now(UTC).isoformat(timespec="seconds") if is_online else None
        return SyncState(self.id, content_key, sent_at)


def read_sync_state(folder: Path, tracker: str) -> SyncState | None:
    """Return what `tracker` has of the run in `folder`, or None if the file cannot be read.

    An unreadable file loses no data: at worst the run is sent again.
    """
    try:
        saved = read_json_object(folder / TRACKED)[tracker]
        content_key = saved["content_key"] if "content_key" in saved else saved["what"]  # the key's earlier name
        return SyncState(saved["id"], content_key, saved["sent_at"])
    except (KeyError, TypeError):
        return None


def write_sync_state(folder: Path, tracker: str, state: SyncState) -> None:
    """Write the state of one tracker; those of other trackers in the same file stay."""
    path = folder / TRACKED
    atomic_write_json(path, read_json_object(path) | {tracker: state._asdict()})


def record_sync_state(run_dir: Path, tracker: str, record: Record) -> SyncState:
    """Return what `tracker` has of this record, with a new id if it has nothing of it."""
    state = read_sync_state(run_dir, tracker)
    if state is not None and state.content_key in (None, record_key(record)):
        return state
    return SyncState(tracked_id(record.run_id, record_key(record)))


def table_sync_state(folder: Path, tracker: str) -> SyncState:
    """Return what `tracker` has of the comparison's summary; a folder has one, which a later one replaces."""
    return read_sync_state(folder, tracker) or SyncState(secrets.token_hex(8))


def record_key(record: Record) -> str:
    """Return the time of the record's start, which no earlier or later record of the same run has."""
    return record.row.get("started_at") or ""


def rows_key(records: Sequence[Record]) -> str:
    """Return a hash of the records that a summary was made of: the runs, and the start of each."""
    moments = [[record.run_id, record_key(record)] for record in records]
    return hashlib.sha256(json.dumps(moments).encode()).hexdigest()[:16]
