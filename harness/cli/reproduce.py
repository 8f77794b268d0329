"""harness reproduce results/NAME: the runs of a comparison again, by the commands that made them, and what differs."""

import shlex
from argparse import Namespace

from rich.text import Text

from harness.cli import compose
from harness.cli.report import read_comparison
from harness.planner.plan import against_words
from harness.records.bundle import unpacked
from harness.records.provenance import command_text, commit_text, version_differences
from harness.records.run_folder import comparison_folder
from harness.records.schema import Record
from harness.report.diff import print_names, print_reproduction
from harness.report.folder_changes import MISSING, compare, pairs
from harness.report.tables import terminal
from harness.report.text import sentence
from harness.util.redact import REPLACEMENT
from harness.util.text import UserError, sanitize

LIMIT = 0.01  # the relative difference from which on a figure differs: peaks of repeats on a CPU differ by 0.5 %

INTERRUPTED = 130


def main(options: Namespace) -> int:
    """Run again what made a folder's runs, with other settings where there are any, and print what differs.

    Return 0 if nothing differs by more than LIMIT and beyond the range of the repeats, 1 if anything does, and
    INTERRUPTED after Ctrl-C. Raises UserError where the commands are unknown, or the folder itself is the target.
    """
    with unpacked(options.folder) as (folder,):
        recorded, source = read_comparison(folder).records, folder.resolve()
    out, names = terminal(), {str(record.row.get("name")) for record in recorded}
    targets = [comparison_folder(name, str(options.to)).path for name in sorted(names)]
    if source in [target.resolve() for target in targets]:
        raise UserError(f"--to={options.to} has the recorded runs themselves: choose another folder")
    differences = dict.fromkeys(text for record in recorded for text in version_differences(record))
    commits = dict.fromkeys(filter(None, map(commit_text, recorded)))
    out.print(Text(sentence("recorded_with", commits=list(commits), differences=list(differences))), soft_wrap=True)
    for words in commands(recorded, options):
        out.print(Text(sanitize(f"$ {shlex.join(['harness', *words])}")), soft_wrap=True)
        if compose.main(words) == INTERRUPTED:
            return INTERRUPTED
    again = [record for target in targets for record in read_comparison(target).records]
    lines = pairs(recorded, again, ())
    if options.settings:  # which leave runs out
        lines = [pair for pair in lines if pair.second is not MISSING]
        recorded = [run for pair in lines for run in pair.first.runs]
    check = compare(recorded, again, LIMIT, across_versions=True)
    print_names({f"A: {options.folder}": recorded, f"B: {', '.join(map(str, targets))}": again}, out)
    ends = [pair for pair in lines if pair.first is not MISSING and "ok" != pair.first.status != pair.second.status]
    return 0 if print_reproduction(check, ends, out) else 1


def commands(recorded: list[Record], options: Namespace) -> list[list[str]]:
    """Return the words of the commands that made runs, with other settings, and without what would send them anywhere.

    Raises UserError if there are none, or one of them had a secret.
    """
    texts = [*dict.fromkeys(filter(None, map(command_text, recorded)))]
    if not texts:
        raise UserError(
            f"{options.folder} does not say which commands made its runs: run them yourself, then harness diff"
        )
    if secret := next((text for text in texts if REPLACEMENT in text), None):
        raise UserError(f"{secret} had a secret, which was not recorded: type it yourself, then harness diff")
    own = ["tracking=none", f"results_dir={options.to}"]
    return [against_words(against_words(shlex.split(text)[1:], own), options.settings) for text in texts]
