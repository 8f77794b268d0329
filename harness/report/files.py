"""The files of a comparison, rebuilt from its records."""

from pathlib import Path

from harness.records import Found, atomic_write_text, write_runs_csv
from harness.report.markdown import page


def write_files(results_dir: Path, found: Found) -> list[Path]:
    """Writes runs.csv and report.md beside the records that were found there and returns their paths."""
    written = [write_runs_csv(results_dir), results_dir / "report.md"]
    running = [f"{record['row']['run_id']} is still running" for record in found.running]
    atomic_write_text(written[1], page(results_dir.resolve().name, found.records, found.problems + running))
    return written
