"""The parts that commands about recorded runs share: reading a comparison, and preparing the terminal."""

import gc
import sys
from pathlib import Path

from harness.records.store import LoadedRecords, read_all
from harness.util.errors import UserError
from harness.util.text import sanitize


def read_comparison(results_dir: Path) -> LoadedRecords:
    """Return the records of a comparison, and print which could not be read. Raises UserError if there is none."""
    loaded = read_all(results_dir)
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
