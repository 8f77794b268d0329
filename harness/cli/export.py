"""harness export results/NAME/RUN: a run's layout as scripts and configuration for other launchers and libraries."""

from argparse import Namespace
from pathlib import Path

from harness.cli.command import argument, command
from harness.export.files import write_files


@command(
    "export",
    "Write a recorded run as configuration of Accelerate, DeepSpeed and torchrun, with a script that trains alike.",
    argument("run", type=Path, metavar="results/NAME/RUN", help="the folder of one run"),
    argument("--to", type=Path, metavar="DIR", help="where to write instead of RUN/export"),
)
def main(options: Namespace) -> None:
    """Write the files of an export. Raises UserError if there is no run with status=ok in the folder."""
    write_files(options.run, options.to)
