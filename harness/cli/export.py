"""harness export results/NAME/RUN: the run's layout for other launchers and libraries, to take home."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.export.files import write_files
from harness.util.errors import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    about = "A recorded run as configuration of Accelerate, DeepSpeed and torchrun, with a script that trains alike."
    parser = argparse.ArgumentParser(prog="harness export", description=about)
    parser.add_argument("run", type=Path, metavar="results/NAME/RUN", help="the folder of one run")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write instead of RUN/export")
    chosen = parser.parse_args(arguments)
    return run_command(lambda: write_files(chosen.run, chosen.to))
