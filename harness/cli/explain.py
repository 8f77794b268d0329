"""harness explain results/NAME/RUN [COLUMN ...]: the arithmetic behind the figures of one run's row."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.records.run_folder import RunFolder
from harness.records.store import read_record
from harness.report.derivation import derivation_lines
from harness.report.derivations import derive
from harness.util.errors import UserError, run_command


def explain(run: Path, columns: Sequence[str]) -> None:
    """Print what the figures of a run were computed from, or those in `columns` alone.

    Raises UserError if there is no such run, and for a column whose arithmetic is not known.
    """
    if not RunFolder(run).record.exists():
        raise UserError(f"{run} is not the folder of a run: choose one of results/NAME/RUN")
    record = read_record(run)
    derivations = derive(record)
    if not derivations:
        raise UserError(f"{run} has no figures to explain: its status is {record.status}")
    for column in columns:
        if column not in derivations:
            raise UserError(f"{column} has no arithmetic in {run}: choose {', '.join(derivations)}")
    for column in columns or derivations:
        print("\n".join(map(sanitize_line, derivation_lines(derivations[column]))), end="\n\n")


def sanitize_line(line: str) -> str:
    """Return a line for a terminal, with its indentation and the spaces between its columns."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness explain` and return its exit status."""
    about = (
        "Show what each figure of a run was computed from: terms that add up to it, each with its counter or formula."
    )
    parser = argparse.ArgumentParser(prog="harness explain", description=about)
    parser.add_argument("run", type=Path, metavar="results/NAME/RUN", help="the folder of one run")
    parser.add_argument(
        "columns", nargs="*", metavar="COLUMN", help="columns of runs.csv; otherwise all that are known"
    )
    options = parser.parse_args(arguments)
    return run_command(lambda: explain(options.run, options.columns))
