"""harness diff A B: what changed between two comparisons, or whether the second holds the first as a baseline."""

import json
from argparse import Namespace
from pathlib import Path

import orjson

from harness.cli.report import prepare_output, read_comparison
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import read_runs_csv
from harness.report.diff import print_comparison, print_names, print_regressions
from harness.report.folder_changes import compare
from harness.report.tables import terminal
from harness.util.text import UserError

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


def main(options: Namespace) -> int:
    """Print what changed from A to B, or what regressed by more than the limit, and return REGRESSED if anything did.

    Raises UserError for a folder without a single readable run, and for a baseline without an ok run.
    """
    if options.fail_above is None and (options.across_versions or options.json):
        options.fail("--across-versions and --json are for a comparison with a baseline: add --fail-above 5%")
    prepare_output()
    before, after, out = read_runs(options.A), read_runs(options.B), terminal()
    sides = {f"A: {options.A}": before, f"B: {options.B}": after}
    if options.fail_above is None:
        print_names(sides, out)
        print_comparison(before, after, out)
        return 0
    check = compare(before, after, options.fail_above, options.across_versions)
    if not check["compared"]:
        raise UserError(f"{options.A} is no baseline: none of its runs ended ok")
    if options.json:
        print(json.dumps(orjson.loads(orjson.dumps(check)), indent=2))  # orjson writes infinity as null
    else:
        print_names(sides, out)
        print_regressions(check, out)
    return 0 if check["holds"] else REGRESSED
