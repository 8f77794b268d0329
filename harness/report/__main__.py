"""python -m harness.report results/NAME: the table in the terminal, runs.csv and report.md beside the records."""

import argparse
import sys
from pathlib import Path

from rich.text import Text

from harness.errors import UserError
from harness.records import printable, read_all
from harness.report.files import write_files
from harness.report.tables import print_table, terminal


def report(results_dir: Path) -> None:
    """Print the table of a directory's runs and write runs.csv and report.md there.

    Raises UserError for a directory without a single readable run.
    """
    found = read_all(results_dir)
    if not found.records:
        why = f"; {found.problems[0]}" if found.problems else ": name the folder of one comparison, results/NAME"
        raise UserError(f"{results_dir} holds no readable record of a run{why}")
    for problem in found.problems:
        print(f"skipped: {printable(problem)}", file=sys.stderr)
    console = terminal()
    print_table(found.records, console)
    for path in write_files(results_dir, found):
        console.print(Text(str(path)), soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.report", description=__doc__)
    parser.add_argument("results_dir", type=Path, metavar="results/NAME", help="the folder of one comparison")
    results_dir = parser.parse_args(arguments).results_dir
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal of few letters still gets its table
    try:
        report(results_dir)
    except UserError as error:
        print(printable(error), file=sys.stderr)
        return 2
    except OSError as error:
        print(printable(f"{error.filename} cannot be written: {error.strerror}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
