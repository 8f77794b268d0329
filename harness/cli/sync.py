"""harness sync results/NAME: the upload of a comparison's runs that the tracker does not have."""

import dataclasses
import sys
from argparse import Namespace
from pathlib import Path

from harness.config.command import TrackingConfig
from harness.config.from_dict import from_dict
from harness.records.store import read_all
from harness.tracking.client import sync_comparison
from harness.util.text import UserError, count_text, sanitize


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


def main(options: Namespace) -> int:
    """Send what the tracker does not have. Return 0 if the tracker has all runs then, 1 if not."""
    target = requested_tracking(options.folder, options.tracker, options.project, options.entity)
    result = sync_comparison(options.folder, target, print_error, options.again, max(options.timeout, 1.0))
    table = " and the table" if result.table and not result.problem else ""
    print(f"sent {count_text(result.runs, 'run')}{table}; the tracker had {result.sent_before} before")
    if result.problem:
        print_error(f"the rest was not sent: {result.problem}")
    return 1 if result.problem else 0
