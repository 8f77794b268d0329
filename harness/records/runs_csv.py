"""TODO harness.records.runs_csv."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.records.provenance import version_differences, versions
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import COLUMNS, Record, Row
from harness.util.files import atomic_write_text
from harness.util.text import sanitize


def rows_of(records: Iterable[Record]) -> list[Row]:
    """A row a record, with `stale` filled in."""
    now = versions()
    return [record["row"] | {"stale": "; ".join(version_differences(record, now)) or None} for record in records]


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Known columns first, then the rows' own as they came."""
    return list(dict.fromkeys((*COLUMNS, *(column for row in rows for column in row))))


def write_runs_csv(results_dir: Path, rows: Sequence[Row]) -> Path:
    """Writes runs.csv: a line a run."""
    columns = columns_of(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_cell(column) for column in columns])
    writer.writerows([csv_cell(row.get(column)) for column in columns] for row in rows)
    path = ComparisonFolder(Path(results_dir)).runs_csv
    atomic_write_text(path, text.getvalue())
    return path


def csv_cell(value: str | int | float | bool | None) -> str:
    """Numbers exact, unknown empty, text on one line and with ' before what a spreadsheet would take for a formula."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return repr(value)
    text = sanitize(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "'")) else text
