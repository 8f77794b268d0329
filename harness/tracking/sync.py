"""The synchronization of a comparison, which sends a tracker the records that it does not have."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from harness.config.command import TrackingConfig
from harness.records.store import read_all
from harness.tracking import payload
from harness.tracking.client import TrackingClient
from harness.util.errors import UserError

LOCAL_SECONDS = 10.0  # the time of the tracker's library for its own work on one run


@dataclasses.dataclass(frozen=True)
class SyncResult:
    """The outcome of one synchronization."""

    runs: int  # sent now
    sent_before: int  # runs that the tracker already had
    table: bool  # whether the summary had to be sent
    problem: str  # why not everything was sent; '' if everything was


def sync_comparison(
    folder: Path,
    tracking: TrackingConfig,
    log: Callable[[str], None],
    again: bool,
    timeout_seconds: float,
) -> SyncResult:
    """Send every record that the tracker does not have, and the comparison's table; with `again` send all of them.

    Stop at the first run that the tracker does not accept. Raises UserError for a folder without a record.
    """
    loaded = read_all(folder)
    if not loaded.records:
        raise UserError(f"{folder} holds no readable record of a run: name the folder of one comparison, results/NAME")
    for problem in loaded.problems:
        log(f"skipped: {problem}")
    online = dataclasses.asdict(dataclasses.replace(tracking, mode="online"))

    def is_sent(sent: Path, content_key: str) -> bool:
        state = payload.read_sync_state(sent, tracking.name)
        return state is not None and state.has(content_key, is_online=True)

    missing = [
        record for record in loaded.records if again or not is_sent(folder / record.run_id, payload.record_key(record))
    ]
    is_table_missing = bool(missing) or not is_sent(folder, payload.rows_key(loaded.records))
    client = TrackingClient(log, upload_seconds=timeout_seconds)
    problem, runs = "", 0
    try:
        for record in missing:
            run_dir = folder / record.run_id
            client.finish_run(online, run_dir)
            problem = wait_delivered(client, run_dir)
            if problem:
                break
            runs += 1
        if not problem and is_table_missing:
            client.log_table(online, folder)
            problem = wait_delivered(client, folder)
    finally:
        client.pending.clear()  # the result has the problem, which close() must not log too
        client.close(1.0)
    return SyncResult(runs, len(loaded.records) - len(missing), is_table_missing, problem)


def wait_delivered(client: TrackingClient, folder: Path) -> str:
    """Wait for the answer about one folder and return why its data were not delivered, '' if they were."""
    patience_seconds = 2 * client.upload_seconds + LOCAL_SECONDS
    client.wait(patience_seconds)
    return client.results.get(str(folder.resolve()), f"no answer within {patience_seconds:g} s") or ""
