"""python -m harness.report results/NAME [more]: the table in the terminal, runs.csv, runs.parquet, report.md and .html.

python -m harness.report --compare results/A results/B: what changed between two of them, in the terminal alone.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from harness.byte_sizes import bytes_of
from harness.errors import UserError, exit_status, printable
from harness.records import Found, read_all
from harness.report.compare import print_comparison
from harness.report.files import write_files
from harness.report.tables import print_table, terminal
from harness.report.together import together


def report(folders: Sequence[Path], to: Path | None, pivot: str | None, fits_in: str | None) -> None:
    """Print the table of all folders' runs and write the report: beside one folder's records, of several to `to`.

    Raises UserError for a folder without a single readable run, and for a pivot that is no column.
    """
    limit = None if fits_in is None else bytes_of(fits_in, "--fits-in")
    view = together([(folder, _read(folder)) for folder in folders])
    if pivot is not None and pivot not in view.table:
        raise UserError(f"--pivot={pivot} is no column of these runs: choose one that runs.csv has, such as world_size")
    console = terminal()
    print_table(view, console)
    where = to or (
        folders[0] if len(folders) == 1 else folders[0].parent / "+".join(folder.resolve().name for folder in folders)
    )
    where.mkdir(parents=True, exist_ok=True)
    for path in write_files(where, view, pivot, limit):
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
    about = "The comparison of recorded runs as a table, a page to read and files of rows; or of two comparisons."
    parser = argparse.ArgumentParser(prog="python -m harness.report", description=about)
    parser.add_argument("folders", type=Path, nargs="*", metavar="results/NAME", help="the folders of comparisons")
    parser.add_argument("--to", type=Path, metavar="results/NAME", help="where to write; otherwise beside the records")
    parser.add_argument("--pivot", metavar="COLUMN", help="a table of strategies against this column of runs.csv")
    parser.add_argument("--fits-in", metavar="SIZE", help="recommend what is fastest in so much memory, such as 24GiB")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("results/A", "results/B"),
        help="what changed from one such folder to another",
    )
    chosen = parser.parse_args(arguments)
    if bool(chosen.folders) == bool(chosen.compare):
        parser.error("name folders to report, or two to --compare")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal of few letters still gets its table
    if chosen.compare:
        return exit_status(lambda: compare(*chosen.compare))
    return exit_status(lambda: report(chosen.folders, chosen.to, chosen.pivot, chosen.fits_in))


if __name__ == "__main__":
    gc.disable()  # thousands of records would be gone through again and again, and nothing of them is garbage
    sys.exit(main())
