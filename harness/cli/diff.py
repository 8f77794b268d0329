"""harness diff results/A results/B: what changed between two comparisons, shown in the terminal."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.cli.comparison import prepare_output, read_comparison
from harness.report.diff import print_comparison
from harness.report.tables import terminal
from harness.util.errors import run_command


def diff(first: Path, second: Path) -> None:
    """Print what changed from the first folder's runs to the second's.

    Raises UserError for a folder without a single readable run.
    """
    before, after = read_comparison(first).records, read_comparison(second).records
    print_comparison((str(first), str(second)), before, after, terminal())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness diff` and return its exit status."""
    about = "Show what changed from one comparison to another: runs, figures, versions and machine."
    parser = argparse.ArgumentParser(prog="harness diff", description=about)
    for name in ("A", "B"):
        parser.add_argument(name, type=Path, metavar=f"results/{name}", help="the folder of one comparison")
    options = parser.parse_args(arguments)
    prepare_output()
    return run_command(lambda: diff(options.A, options.B))
