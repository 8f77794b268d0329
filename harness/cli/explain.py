"""harness explain results/NAME/RUN [COLUMN ...]: the arithmetic behind the figures of one run's row."""

from argparse import Namespace

from harness.metrics.formulas import derivations_of
from harness.records.store import read_run
from harness.report.derivations import derivation_lines
from harness.util.text import UserError, printable


def main(options: Namespace) -> None:
    """Print what the figures of a run were computed from, or those of the named columns alone.

    Raises UserError if there is no such run, and for a column whose arithmetic is not known.
    """
    run, columns = options.run, options.columns
    record = read_run(run)
    derivations = derivations_of(record)
    if not derivations:
        raise UserError(f"{run} has no figures to explain: its status is {record.status}")
    for column in columns:
        if column not in derivations:
            raise UserError(f"{column} has no arithmetic in {run}: choose {', '.join(derivations)}")
    for column in columns or derivations:
        print("\n".join(map(printable, derivation_lines(derivations[column]))), end="\n\n")
