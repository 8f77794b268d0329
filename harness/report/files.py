"""The files of a comparison, rebuilt from its records."""

from pathlib import Path

from harness.records import atomic_write_text, read_all, write_runs_csv
from harness.report.markdown import page


def write_files(results_dir: Path) -> list[Path]:
    """Writes runs.csv and report.md beside the records and returns their paths."""
    found = read_all(results_dir)
    report = results_dir / "report.md"
    atomic_write_text(report, page(results_dir.resolve().name, found.records, found.problems))
    return [write_runs_csv(results_dir), report]
