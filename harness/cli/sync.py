"""harness sync results/NAME: the upload of a comparison's runs that the tracker does not have."""

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.config.command import TrackingConfig
from harness.config.from_dict import from_dict
from harness.records.run_folder import TRACKED, ComparisonFolder
from harness.records.schema import Record
from harness.records.store import read_all
from harness.tracking import payload
from harness.tracking.base import check_tracker, tracker_names
from harness.tracking.client import TrackingClient
from harness.util.text import UserError, count_text, sanitize

LOCAL_SECONDS = 10.0  # the time of the tracker's library for its own work on one run


def main(options: Namespace) -> int:
    """Send every record that the tracker does not have, and the comparison's table; with --again send all of them.

    Stop at the first run that the tracker does not accept. Return 0 if the tracker has all runs then, 1 if not. Raises
    UserError for a folder without a record.
    """
    folder, loaded = options.folder, read_all(options.folder)
    if not loaded.records:
        raise UserError(f"{folder} holds no readable record of a run: name the folder of one comparison, results/NAME")
    for problem in loaded.problems:
        print_error(f"skipped: {problem}")
    comparison = ComparisonFolder(folder)
    for path in comparison.damaged_files():
        if path.name == TRACKED:
            print_error(f"{path} is damaged: what it may have known to be sent is sent again")
    tracking = requested_tracking(loaded.records, options)
    check_tracker(tracking.name)

    def is_sent(sent: Path, content_key: str) -> bool:
        state = payload.read_sync_state(sent, tracking.name)
        return state is not None and state.has(content_key, is_online=True)

    content_keys = {comparison.run(record.run_id).path: payload.record_key(record) for record in loaded.records}
    missing = [sent for sent, content_key in content_keys.items() if options.again or not is_sent(sent, content_key)]
    is_table_missing = bool(missing) or not is_sent(folder, payload.rows_key(loaded.records))
    timeout_seconds = max(options.timeout, 1.0)
    client = TrackingClient(print_error, upload_seconds=timeout_seconds)
    patience_seconds = 2 * timeout_seconds + LOCAL_SECONDS
    problem, delivered = "", 0
    try:
        for sent in [*missing, folder] if is_table_missing else missing:
            client.hand_over("log_table" if sent == folder else "finish_run", dataclasses.asdict(tracking), sent)
            client.wait(patience_seconds)
            problem = client.results.get(str(sent.resolve()), f"no answer within {patience_seconds:g} s") or ""
            if problem:
                break
            delivered += 1
    finally:
        client.pending.clear()  # the last line has the problem, which close() must not log too
        client.close(1.0)
    table = " and the table" if is_table_missing and not problem else ""
    count = count_text(min(delivered, len(missing)), "run")
    print(f"sent {count}{table}; the tracker had {len(loaded.records) - len(missing)} before")
    if problem:
        print_error(f"the rest was not sent: {problem}")
    return 1 if problem else 0


def requested_tracking(records: Sequence[Record], options: Namespace) -> TrackingConfig:
    """Return where the comparison's last run was tracked, online, with what the command line says instead."""
    wanted = [options.tracker] if options.tracker else tracker_names()
    tracking = TrackingConfig(options.tracker or "wandb")
    for record in records:
        with suppress(UserError, KeyError, TypeError):  # of a row that was refused because of it
            recorded = from_dict(TrackingConfig, record.config["tracking"], "tracking")
            tracking = recorded if recorded.name in wanted else tracking
    own = {key: getattr(options, key) or getattr(tracking, key) for key in ("project", "entity", "uri")}
    return dataclasses.replace(tracking, mode="online", **own)


def print_error(line: str) -> None:
    """Print a line on standard error."""
    print(sanitize(line), file=sys.stderr)
