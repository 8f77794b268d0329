"""runs.csv: the rows of all runs of a comparison."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.records.columns import COLUMN_NAMES
from harness.records.provenance import version_differences, versions
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record, Row
from harness.util.files import atomic_write_text
from harness.util.text import sanitize


def rows_of(records: Iterable[Record]) -> list[Row]:
    """Return one row per record, with `stale_reason` filled in."""
    installed = versions()
    return [
        record.row | {"stale_reason": "; ".join(version_differences(record, installed)) or None} for record in records
    ]


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the registered columns, followed by those that only these rows have."""
    return list(dict.fromkeys((*COLUMN_NAMES, *(column for row in rows for column in row))))


def write_runs_csv(results_dir: Path, rows: Sequence[Row]) -> Path:
    """Write runs.csv, with one line per run, and return its path."""
    columns = columns_of(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_cell(column) for column in columns])
    writer.writerows([csv_cell(row.get(column)) for column in columns] for row in rows)
    path = ComparisonFolder(Path(results_dir)).runs_csv
    atomic_write_text(path, text.getvalue())
    return path


def csv_cell(value: str | int | float | bool | None) -> str:
    """Return a cell: numbers exact, unknown values empty, text on one line, a ' before what looks like a formula."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return repr(value)
    text = sanitize(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "'")) else text
