"""harness export results/NAME/RUN: a run's layout as scripts and configuration for other launchers and libraries."""

from argparse import Namespace

from harness.export.files import write_files


def main(options: Namespace) -> None:
    """Write the files of an export. Raises UserError if there is no run with status=ok in the folder."""
    write_files(options.run, options.to)
