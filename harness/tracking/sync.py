"""What a tracker has not got of a comparison, told again from the records."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from harness.config.schema import TrackingConfig
from harness.records.schema import Record
from harness.records.store import read_all
from harness.tracking import sync_state
from harness.tracking.client import TrackingClient
from harness.util.errors import UserError

ANSWER_SECONDS = 30.0  # of a server, to begin a run and again to have it whole

LOCAL_SECONDS = 10.0  # for the tracker's own work on one run


@dataclasses.dataclass(frozen=True)
class SyncResult:
    runs: int
    already: int  # there before
    table: bool  # whether there is a new one
    trouble: str  # why not all of it was sent, '' if it was


def upload(
    folder: Path, to: TrackingConfig, say: Callable[[str], None], again: bool = False, seconds: float = ANSWER_SECONDS
) -> SyncResult:
    """Sends every record that is not at the tracker yet, and the comparison's table; `again` sends all.

    Raises UserError for a folder without a record. Stops at the first that is not taken.
    """
    found = read_all(folder)
    if not found.records:
        raise UserError(f"{folder} holds no readable record of a run: name the folder of one comparison, results/NAME")
    for problem in found.problems:
        say(f"skipped: {problem}")
    asked = dataclasses.asdict(dataclasses.replace(to, mode="online"))
    lacking = [record for record in found.records if again or not is_sent(folder, to.name, record)]
    had = sync_state.read_sync_state(folder, to.name)
    is_told = had is not None and had.sent_at is not None and had.what == sync_state.rows_key(found.records)
    feed = TrackingClient(say, upload_seconds=seconds)
    trouble, runs = "", 0
    try:
        for record in lacking:
            run_dir = folder / record["row"]["run_id"]
            feed.end(asked, run_dir)
            trouble = wait_delivered(feed, run_dir)
            if trouble:
                break
            runs += 1
        if not trouble and (lacking or not is_told):
            feed.table(asked, folder)
            trouble = wait_delivered(feed, folder)
    finally:
        feed.pending.clear()  # it is said here
        feed.close(1.0)
    return SyncResult(runs, len(found.records) - len(lacking), bool(lacking) or not is_told, trouble)


def is_sent(folder: Path, tracker: str, record: Record) -> bool:
    had = sync_state.read_sync_state(folder / record["row"]["run_id"], tracker)
    return had is not None and had.what == sync_state.record_key(record) and had.sent_at is not None


def wait_delivered(feed: TrackingClient, folder: Path) -> str:
    """Why it was not, '' if it was."""
    patience = 2 * feed.upload_seconds + LOCAL_SECONDS
    feed.wait(patience)
    silent = f"no answer within {patience:g} s"
    return feed.results.get(str(folder.resolve()), silent) or ""
