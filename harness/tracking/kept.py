"""What a tracker has of a run: a small file in the run's folder, gone with it when the run is made anew."""

import hashlib
import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from harness.records import Record, atomic_write_json
from harness.tracking import id_of

FILE = "tracking.json"


class Kept(NamedTuple):
    """Of one tracker."""

    id: str
    what: str | None = None  # the record, by its start, or the summary's rows; None while a run goes on
    sent_at: str | None = None  # UTC; None: not at the server


def read(folder: Path, tracker: str) -> Kept | None:
    """None where nothing can be read: the worst that follows is that something is sent again."""
    try:
        return Kept(**json.loads((folder / FILE).read_text())[tracker])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, tracker: str, kept: Kept) -> None:
    try:
        others = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        others = {}
    atomic_write_json(folder / FILE, {**others, tracker: kept._asdict()})


def of_record(run_dir: Path, tracker: str, record: Record) -> Kept:
    """What there is of this record; a new name where there is none of it."""
    found = read(run_dir, tracker)
    if found is not None and found.what in (None, key(record)):
        return found
    return Kept(id_of(record["row"]["run_id"], key(record)))


def of_table(folder: Path, tracker: str) -> Kept:
    """One summary a folder, which later ones replace."""
    return read(folder, tracker) or Kept(secrets.token_hex(8))


def done(kept: Kept, what: str, sent: bool) -> Kept:
    return Kept(kept.id, what, datetime.now(UTC).isoformat(timespec="seconds") if sent else None)


def key(record: Record) -> str:
    """Tells a record from another of the same run, by its start."""
    return record["row"].get("started_at") or ""


def rows_key(records: Sequence[Record]) -> str:
    """What a summary is of: these runs, each as it was made then."""
    moments = [[record["row"]["run_id"], key(record)] for record in records]
    return hashlib.sha256(json.dumps(moments).encode()).hexdigest()[:16]
