"""The state of a run at its trackers: a small file in the run's folder, deleted with it when the run is repeated."""

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
    """The part of one run, or of one comparison's summary, that one tracker has."""

    id: str  # the tracker's id of the run
    content_key: str | None = None  # record_key() or rows_key() of what the tracker has; None while a run goes on
    sent_at: str | None = None  # the UTC time at which the server had all of it; None: the server does not have it


def read_sync_state(folder: Path, tracker: str) -> SyncState | None:
    """Return what `tracker` has of the run in `folder`, or None if the file cannot be read.

    An unreadable file loses no data: at worst the run is sent again.
    """
    try:
        saved = json.loads((folder / SYNC_STATE_FILE).read_text())[tracker]
        content_key = saved["content_key"] if "content_key" in saved else saved["what"]  # the key's earlier name
        return SyncState(saved["id"], content_key, saved["sent_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_sync_state(folder: Path, tracker: str, state: SyncState) -> None:
    """Write the state of one tracker; those of other trackers in the same file stay."""
    try:
        others = json.loads((folder / SYNC_STATE_FILE).read_text())
    except (OSError, ValueError):
        others = {}
    atomic_write_json(folder / SYNC_STATE_FILE, {**others, tracker: state._asdict()})


def record_sync_state(run_dir: Path, tracker: str, record: Record) -> SyncState:
    """Return what `tracker` has of this record, with a new id if it has nothing of it."""
    state = read_sync_state(run_dir, tracker)
    if state is not None and state.content_key in (None, record_key(record)):
        return state
    return SyncState(tracked_id(record.run_id, record_key(record)))


def table_sync_state(folder: Path, tracker: str) -> SyncState:
    """Return what `tracker` has of the comparison's summary; a folder has one, which a later one replaces."""
    return read_sync_state(folder, tracker) or SyncState(secrets.token_hex(8))


def mark_synced(state: SyncState, content_key: str, is_sent: bool) -> SyncState:
    """Return the state after the tracker has received that content, at its server if `is_sent`."""
    sent_at = datetime.now(UTC).isoformat(timespec="seconds") if is_sent else None
    return SyncState(state.id, content_key, sent_at)


def record_key(record: Record) -> str:
    """Return the time of the record's start, which no earlier or later record of the same run has."""
    return record.row.get("started_at") or ""


def rows_key(records: Sequence[Record]) -> str:
    """Return a hash of the records that a summary was made of: the runs, and the start of each."""
    moments = [[record.run_id, record_key(record)] for record in records]
    return hashlib.sha256(json.dumps(moments).encode()).hexdigest()[:16]
