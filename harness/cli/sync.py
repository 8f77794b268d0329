"""harness sync results/NAME: sends to the tracker what it has not got of a comparison."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.config.from_dict import from_dict
from harness.config.schema import TrackingConfig
from harness.records.store import read_all
from harness.tracking.base import tracker_names
from harness.tracking.sync import ANSWER_SECONDS, sync_comparison
from harness.util.errors import UserError, run_command
from harness.util.text import sanitize


def requested_tracking(folder: Path, tracker: str, project: str | None, entity: str | None) -> TrackingConfig:
    """Where the comparison's runs were to go, as the last of them says, and where the command line says otherwise."""
    for record in reversed(read_all(folder).records):
        try:
            found: TrackingConfig = from_dict(TrackingConfig, record["config"]["tracking"], "tracking")
        except (UserError, KeyError, TypeError):  # of a row that is refused for it
            continue
        if found.name == tracker:
            break
    else:
        found = TrackingConfig(tracker)
    return dataclasses.replace(found, project=project or found.project, entity=entity or found.entity)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all is there; 1: some of it is not, with the reason; 2: a mistake in the command."""
    about = (
        "Sends the runs of a comparison that are not at the tracker's server yet, and their table, from the records."
    )
    parser = argparse.ArgumentParser(prog="harness sync", description=about)
    parser.add_argument("folder", type=Path, metavar="results/NAME", help="the folder of one comparison")
    parser.add_argument("--tracker", choices=tracker_names(), default="wandb")
    parser.add_argument("--project", help="by default the runs' own, tracking.project")
    parser.add_argument("--entity", help="user or team; by default the runs' own, tracking.entity")
    parser.add_argument("--again", action="store_true", help="also what was sent before: it replaces what is there")
    limit = "seconds that the server has to begin a run, and again to have it whole"
    parser.add_argument("--timeout", type=float, default=ANSWER_SECONDS, help=f"{limit}; by default %(default)g")
    chosen = parser.parse_args(arguments)
    failed = False

    def complain(line: str) -> None:
        print(sanitize(line), file=sys.stderr)

    def command() -> None:
        nonlocal failed
        to = requested_tracking(chosen.folder, chosen.tracker, chosen.project, chosen.entity)
        sent = sync_comparison(chosen.folder, to, complain, chosen.again, max(chosen.timeout, 1.0))
        table = ", and their table" if sent.table and not sent.problem else ""
        print(f"{sent.runs} runs sent{table}; {sent.already} were there already")
        if sent.problem:
            failed = True
            complain(f"the rest was not sent: {sent.problem}")

    return run_command(command) or int(failed)
