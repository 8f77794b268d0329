"""harness diff A B: what changed between two comparisons, or whether the second holds the first as a baseline."""

import json
from argparse import Namespace

import orjson

from harness.cli.report import prepare_output, read_comparison
from harness.records.bundle import unpacked
from harness.report.diff import print_comparison, print_names, print_regressions
from harness.report.folder_changes import compare
from harness.report.tables import terminal
from harness.util.text import UserError

REGRESSED = 1  # the exit status of a baseline that is not held


def main(options: Namespace) -> int:
    """Print what changed from A to B, or what regressed by more than the limit, and return REGRESSED if anything did.

    Raises UserError for a folder without a single readable run, and for a baseline without an ok run.
    """
    if options.fail_above is None and (options.across_versions or options.json):
        options.fail("--across-versions and --json are for a comparison with a baseline: add --fail-above 5%")
    prepare_output()
    with unpacked(options.A, options.B) as folders:
        before, after = (read_comparison(folder).records for folder in folders)
    out = terminal()
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
