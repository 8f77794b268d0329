"""harness report results/NAME ...: the table in the terminal, and runs.csv, runs.parquet, report.md and report.html."""

import gc
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from harness.records.bundle import SUFFIX, unpacked, write_bundle
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import LoadedRecords, read_runs, read_runs_csv
from harness.report.document import charts
from harness.report.files import FOLDER, export, parse_formats, parse_width, write_files
from harness.report.sections import sections
from harness.report.tables import print_answers, print_table, terminal
from harness.report.text import sentence
from harness.report.view import View, view_of
from harness.util.text import UserError, count_text, parse_bytes, sanitize


def main(options: Namespace) -> None:
    """Print the table of all folders' runs, which may be in bundles, and write their report and their own bundle.

    Raises UserError for a bundle of several folders or another suffix, and for what write_report() does not take.
    """
    prepare_output()
    bundle = options.bundle
    if bundle is not None and (len(options.folders) > 1 or not bundle.name.endswith(SUFFIX)):
        raise UserError(f"--bundle={bundle} is the archive of one comparison: name one folder, and a file *{SUFFIX}")
    with unpacked(*options.folders) as folders:
        target = write_report(options, folders)
        if bundle is not None:
            print(write_bundle(bundle, folders[0].resolve().name, folders[0], target))


def write_report(options: Namespace, folders: list[Path]) -> Path:
    """Print the table of the runs in folders, write their report, and return the folder that has it.

    The report goes to the folder `to`, or by default into the only folder, or for several folders or a bundle into one
    beside the first whose name joins theirs. A single folder with a table alone gets none. Raises UserError for one
    without a single readable run, for a pivot that is no column, and for a folder whose table has other runs.
    """
    formats = () if options.export is None else parse_formats(options.export)
    if options.width is not None and not formats:
        raise UserError("--width is the width of exported charts: add --export, such as --export=pdf,latex")
    width = None if options.width is None else parse_width(options.width)
    limit = None if options.fits_in is None else parse_bytes(options.fits_in, "--fits-in")
    view = view_of(*((folder, read_comparison(folder)) for folder in folders))
    if options.pivot is not None and all(options.pivot not in line.values for line in view.runs):
        raise UserError(
            f"--pivot={options.pivot} is not a column of these runs: choose one of runs.csv, such as world_size"
        )
    console = terminal()
    print_table(view, console)
    print_answers(view, console, options.pivot, limit)
    if alone := [record for record in view.records if record.is_row_alone]:
        console.print(Text(sentence("of_table", of=alone, total=len(view.lines))))
    if len(alone) == len(view.records) and len(folders) == 1 and options.to is None:
        console.print(Text(f"nothing is written into {options.folders[0]}, which has a table alone: add --to FOLDER"))
        return folders[0]
    joined = options.folders[0].parent / "+".join(folder.resolve().name for folder in folders)
    is_unpacked = folders != options.folders
    target = options.to or (joined if is_unpacked or len(folders) > 1 else folders[0])
    if options.to is not None or is_unpacked:
        refuse_loss(target, view)
    target.mkdir(parents=True, exist_ok=True)
    report = sections(view, options.pivot, limit)
    paths = write_files(target, view, report)
    if formats:
        paths += export(target / FOLDER, view, list(charts(report)), formats, width, options.statistic)
    for path in paths:
        console.print(Text(str(path)), soft_wrap=True)
    return target


def refuse_loss(target: Path, view: View) -> None:
    """Raise UserError if a folder has a runs.csv of runs that ended ok and that the report lacks."""
    table, known = ComparisonFolder(target).runs_csv, {*view.running, *(record.run_id for record in view.records)}
    rows: list[Record] = []
    with suppress(UserError):  # a table that cannot be read, or is not there, has nothing to lose
        rows = read_runs_csv(table)
    lost = [row.run_id for row in rows if row.status == "ok" and row.run_id not in known]
    if lost:
        raise UserError(
            f"--to={target}: its runs.csv has {count_text(len(lost), 'run')} that this report lacks, such as {lost[0]}:"
            " choose another folder"
        )


def read_comparison(results_dir: Path) -> LoadedRecords:
    """Return the runs of a comparison, or of its table alone, and print which records could not be read.

    Raises UserError if there are none.
    """
    loaded = read_runs(results_dir)
    if not loaded.records:
        hint = f"; {loaded.problems[0]}" if loaded.problems else ": name the folder of one comparison, results/NAME"
        raise UserError(f"{results_dir} holds no readable record of a run{hint}")
    for problem in loaded.problems:
        print(f"skipped: {sanitize(problem)}", file=sys.stderr)
    return loaded


def prepare_output() -> None:
    """Make any terminal able to show the table, and stop the garbage collector from scanning thousands of records."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    gc.disable()  # nothing that is read becomes garbage before the command ends
