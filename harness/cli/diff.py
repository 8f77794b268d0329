"""harness diff A B: what changed between two comparisons, or whether the second holds the first as a baseline."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from harness.cli.report import prepare_output, read_comparison
from harness.records.run_folder import ComparisonFolder
from harness.records.runs_csv import read_runs_csv
from harness.records.schema import Record
from harness.report.diff import print_comparison, print_names, print_regressions, regressions_json
from harness.report.regressions import compare
from harness.report.tables import terminal
from harness.util.errors import UserError, run_command

REGRESSED = 1  # the exit status of a baseline that is not held


def read_runs(path: Path) -> list[Record]:
    """Return the runs of a folder, or the rows of a runs.csv, which may lie in a folder without records.

    Raises UserError if there are none.
    """
    table = ComparisonFolder(path).runs_csv
    if path.suffix == ".csv":
        return read_runs_csv(path)
    if table.exists() and not any(ComparisonFolder(path).recorded_runs()):
        return read_runs_csv(table)
    return read_comparison(path).records


def diff(first: Path, second: Path) -> None:
    """Print what changed from the first runs to the second.

    Raises UserError for a folder without a single readable run.
    """
    before, after = read_runs(first), read_runs(second)
    print_comparison((str(first), str(second)), before, after, terminal())


def check(first: Path, second: Path, limit: float, across_versions: bool, as_json: bool) -> bool:
    """Print what regressed from the first runs to the second by more than the limit, and return whether nothing did.

    Raises UserError for a folder without a single readable run, and for a baseline without an ok run.
    """
    before, after = read_runs(first), read_runs(second)
    comparison = compare(before, after, limit, across_versions)
    if not comparison.compared:
        raise UserError(f"{first} is no baseline: none of its runs ended ok")
    if as_json:
        print(regressions_json(comparison))
    else:
        out = terminal()
        print_names((str(first), str(second)), (before, after), out)
        print_regressions(comparison, out)
    return not comparison.regressed


def parse_share(text: str) -> float:
    """Return a percentage such as 5% as a fraction. Raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage: write 5%, or 0% for no growth at all")
    return float(match[1]) / 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness diff` and return its exit status: 1 if a baseline is not held."""
    about = (
        "Show what changed from one comparison to another: runs, figures, versions and machine. With --fail-above, show"
        " what regressed instead, and exit with status 1 if anything did: memory, bytes sent or FLOPs grew by more than"
        " the limit, a speed fell by more than it and left the range of its undisturbed repeats, or a run that was ok"
        " fails or is missing."
    )
    parser = argparse.ArgumentParser(prog="harness diff", description=about)
    for name in ("A", "B"):
        parser.add_argument(
            name, type=Path, metavar=f"results/{name}", help="the folder of one comparison, or its runs.csv"
        )
    parser.add_argument(
        "--fail-above", type=parse_share, metavar="SHARE", help="the limit, such as 5%%; A is the baseline"
    )
    parser.add_argument("--across-versions", action="store_true", help="compare speeds although versions differ")
    parser.add_argument("--json", action="store_true", help="print what regressed as JSON")
    options = parser.parse_args(arguments)
    if options.fail_above is None and (options.across_versions or options.json):
        parser.error("--across-versions and --json are for a comparison with a baseline: add --fail-above 5%")
    prepare_output()
    holds = True

    def show() -> None:
        nonlocal holds
        if options.fail_above is None:
            diff(options.A, options.B)
        else:
            holds = check(options.A, options.B, options.fail_above, options.across_versions, options.json)

    return run_command(show) or (0 if holds else REGRESSED)
