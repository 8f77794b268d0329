"""python -m harness.report results/NAME: the table in the terminal, runs.csv and report.md beside the records.

python -m harness.report --compare results/A results/B: what changed between two of them, in the terminal alone.
"""

import argparse
import sys
from pathlib import Path

from rich.text import Text

from harness.errors import UserError, exit_status, printable
from harness.records import Found, read_all
from harness.report.compare import print_comparison
from harness.report.files import write_files
from harness.report.tables import print_table, terminal


def report(results_dir: Path) -> None:
    """Print the table of a directory's runs and write runs.csv and report.md there.

    Raises UserError for a directory without a single readable run.
    """
    found = _read(results_dir)
    console = terminal()
    print_table(found.records, console)
    for path in write_files(results_dir, found):
        console.print(Text(str(path)), soft_wrap=True)


def compare(first: Path, second: Path) -> None:
    """Print what changed from the first directory's runs to the second's. Raises UserError as report() does."""
    print_comparison((str(first), str(second)), _read(first).records, _read(second).records, terminal())


def _read(results_dir: Path) -> Found:
    found = read_all(results_dir)
    if not found.records:
        why = f"; {found.problems[0]}" if found.problems else ": name the folder of one comparison, results/NAME"
        raise UserError(f"{results_dir} holds no readable record of a run{why}")
    for problem in found.problems:
        print(f"skipped: {printable(problem)}", file=sys.stderr)
    return found


def main(arguments: list[str] | None = None) -> int:
    about = "The comparison of recorded runs as a table in the terminal, runs.csv and report.md; or of two comparisons."
    parser = argparse.ArgumentParser(prog="python -m harness.report", description=about)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("results_dir", type=Path, nargs="?", metavar="results/NAME", help="the folder of one comparison")
    which.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("results/A", "results/B"),
        help="what changed from one such folder to another",
    )
    chosen = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal of few letters still gets its table
    return exit_status(lambda: compare(*chosen.compare) if chosen.compare else report(chosen.results_dir))


if __name__ == "__main__":
    sys.exit(main())
