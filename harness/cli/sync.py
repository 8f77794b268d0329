"""harness sync results/NAME: the upload of a comparison's runs that the tracker does not have."""

import dataclasses
import sys
from argparse import Namespace
from pathlib import Path

from harness.cli.command import argument, command
from harness.config.command import TrackingConfig
from harness.config.from_dict import from_dict
from harness.records.store import read_all
from harness.tracking.base import tracker_names
from harness.tracking.sync import ANSWER_SECONDS, sync_comparison
from harness.util.errors import UserError
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


def print_error(line: str) -> None:
    """Print a line on standard error."""
    print(sanitize(line), file=sys.stderr)


@command(
    "sync",
    "Send the runs that the tracker's server does not have yet, and their table, from the records.",
    argument("folder", type=Path, metavar="results/NAME", help="the folder of one comparison"),
    argument("--tracker", choices=tracker_names(), default="wandb"),
    argument("--project", help="by default the runs' own, tracking.project"),
    argument("--entity", help="user or team; by default the runs' own, tracking.entity"),
    argument("--again", action="store_true", help="also send what was sent before, and replace it"),
    argument(
        "--timeout",
        type=float,
        default=ANSWER_SECONDS,
        help="seconds that the server has to start a run, and again to receive all of it; by default %(default)g",
    ),
)
def main(options: Namespace) -> int:
    """Send what the tracker does not have. Return 0 if the tracker has all runs then, 1 if not."""
    target = requested_tracking(options.folder, options.tracker, options.project, options.entity)
    result = sync_comparison(options.folder, target, print_error, options.again, max(options.timeout, 1.0))
    table = " and the table" if result.table and not result.problem else ""
    print(f"sent {count_text(result.runs, 'run')}{table}; the tracker had {result.sent_before} before")
    if result.problem:
        print_error(f"the rest was not sent: {result.problem}")
    return 1 if result.problem else 0
