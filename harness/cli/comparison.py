"""What the commands about recorded runs share: reading one comparison, and preparing the terminal."""

import gc
import sys
from pathlib import Path

from harness.records.store import LoadedRecords, read_all
from harness.util.errors import UserError
from harness.util.text import sanitize


def read_comparison(results_dir: Path) -> LoadedRecords:
    found = read_all(results_dir)
    if not found.records:
        why = f"; {found.problems[0]}" if found.problems else ": name the folder of one comparison, results/NAME"
        raise UserError(f"{results_dir} holds no readable record of a run{why}")
    for problem in found.problems:
        print(f"skipped: {sanitize(problem)}", file=sys.stderr)
    return found


def prepare_output() -> None:
    """Prepare this process for a report: any terminal gets its table, and no collector walks thousands of records."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    gc.disable()  # nothing of what is read is garbage before the command ends
