"""What a tracker has of a run: a small file in the run's folder, gone with it when the run is made anew."""

import hashlib
import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from harness.records.schema import Record
from harness.tracking.base import tracked_id
from harness.util.files import atomic_write_json

SYNC_STATE_FILE = "tracking.json"


class SyncState(NamedTuple):
    """Of one tracker."""

    id: str
    what: str | None = None  # the record, by its start, or the summary's rows; None while a run goes on
    sent_at: str | None = None  # UTC; None: not at the server


def read_sync_state(folder: Path, tracker: str) -> SyncState | None:
    """None where nothing can be read: the worst that follows is that something is sent again."""
    try:
        return SyncState(**json.loads((folder / SYNC_STATE_FILE).read_text())[tracker])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_sync_state(folder: Path, tracker: str, kept: SyncState) -> None:
    try:
        others = json.loads((folder / SYNC_STATE_FILE).read_text())
    except (OSError, ValueError):
        others = {}
    atomic_write_json(folder / SYNC_STATE_FILE, {**others, tracker: kept._asdict()})


def state_of(run_dir: Path, tracker: str, record: Record) -> SyncState:
    """What there is of this record; a new name where there is none of it."""
    found = read_sync_state(run_dir, tracker)
    if found is not None and found.what in (None, record_key(record)):
        return found
    return SyncState(tracked_id(record["row"]["run_id"], record_key(record)))


def state_of_table(folder: Path, tracker: str) -> SyncState:
    """One summary a folder, which later ones replace."""
    return read_sync_state(folder, tracker) or SyncState(secrets.token_hex(8))


def mark_synced(kept: SyncState, what: str, sent: bool) -> SyncState:
    return SyncState(kept.id, what, datetime.now(UTC).isoformat(timespec="seconds") if sent else None)


def record_key(record: Record) -> str:
    """Tells a record from another of the same run, by its start."""
    return record["row"].get("started_at") or ""


def rows_key(records: Sequence[Record]) -> str:
    """What a summary is of: these runs, each as it was made then."""
    moments = [[record["row"]["run_id"], record_key(record)] for record in records]
    return hashlib.sha256(json.dumps(moments).encode()).hexdigest()[:16]
