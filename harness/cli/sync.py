"""harness sync results/NAME: the upload of a comparison's runs that the tracker does not have."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.config.command import TrackingConfig
from harness.config.from_dict import from_dict
from harness.records.store import read_all
from harness.tracking.base import tracker_names
from harness.tracking.sync import ANSWER_SECONDS, sync_comparison
from harness.util.errors import UserError, run_command
from harness.util.text import count_text, sanitize


def requested_tracking(folder: Path, tracker: str, project: str | None, entity: str | None) -> TrackingConfig:
    """Return where the comparison's last run was tracked, with the project and entity of the command line."""
    for record in reversed(read_all(folder).records):
        try:
            tracking = from_dict(TrackingConfig, record.config["tracking"], "tracking")
        except (UserError, KeyError, TypeError):  # of a row that was refused because of it
            continue
        if tracking.name == tracker:
            break
    else:
        tracking = TrackingConfig(tracker)
    return dataclasses.replace(tracking, project=project or tracking.project, entity=entity or tracking.entity)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness sync`. Return 0 if the tracker has all runs, 1 if not, 2 for a mistake in the command."""
    about = "Send the runs that the tracker's server does not have yet, and their table, from the records."
    parser = argparse.ArgumentParser(prog="harness sync", description=about)
    parser.add_argument("folder", type=Path, metavar="results/NAME", help="the folder of one comparison")
    parser.add_argument("--tracker", choices=tracker_names(), default="wandb")
    parser.add_argument("--project", help="by default the runs' own, tracking.project")
    parser.add_argument("--entity", help="user or team; by default the runs' own, tracking.entity")
    parser.add_argument("--again", action="store_true", help="also send what was sent before, and replace it")
    limit = "seconds that the server has to start a run, and again to receive all of it"
    parser.add_argument("--timeout", type=float, default=ANSWER_SECONDS, help=f"{limit}; by default %(default)g")
    options = parser.parse_args(arguments)
    failed = False

    def print_error(line: str) -> None:
        print(sanitize(line), file=sys.stderr)

    def command() -> None:
        nonlocal failed
        target = requested_tracking(options.folder, options.tracker, options.project, options.entity)
        result = sync_comparison(options.folder, target, print_error, options.again, max(options.timeout, 1.0))
        table = " and the table" if result.table and not result.problem else ""
        print(f"sent {count_text(result.runs, 'run')}{table}; the tracker had {result.sent_before} before")
        if result.problem:
            failed = True
            print_error(f"the rest was not sent: {result.problem}")

    return run_command(command) or int(failed)
