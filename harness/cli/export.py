"""harness export results/NAME/RUN: a run's layout as scripts and configuration for other launchers and libraries."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.export.files import write_files
from harness.util.errors import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness export` and return its exit status."""
    about = (
        "Write a recorded run as configuration of Accelerate, DeepSpeed and torchrun, with a script that trains alike."
    )
    parser = argparse.ArgumentParser(prog="harness export", description=about)
    parser.add_argument("run", type=Path, metavar="results/NAME/RUN", help="the folder of one run")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write instead of RUN/export")
    options = parser.parse_args(arguments)
    return run_command(lambda: write_files(options.run, options.to))
