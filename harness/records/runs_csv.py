"""runs.csv: the rows of all runs of a comparison, written and read."""

import csv
import functools
import io
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.records.provenance import machine_text, version_differences, versions, versions_text
from harness.records.rank_report import STATUSES
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import COLUMNS, Cell, Record, Row, column_type, with_current_names
from harness.util.files import atomic_write_text
from harness.util.text import UserError, sanitize


def rows_of(records: Iterable[Record]) -> list[Row]:
    """Return one row per record, with the columns on its origin: `machine`, `versions` and `stale_reason`."""
    installed = versions()
    return [
        record.row
        | {"stale_reason": "; ".join(version_differences(record, installed)) or None}
        | {"machine": machine_text(record), "versions": versions_text(record)}
        for record in records
    ]


def columns_of(rows: Sequence[Row]) -> dict[str, list[Cell]]:
    """Return the values of the registered columns by name, followed by those of columns that only these rows have."""
    names: dict[str, None] = dict.fromkeys(COLUMNS)
    for row in rows:
        names |= dict.fromkeys(row)
    columns = zip(*(map(row.get, names) for row in rows), strict=True) if rows else itertools.repeat(())
    return {name: list(values) for name, values in zip(names, columns, strict=False)}


def write_runs_csv(results_dir: Path, rows: Sequence[Row]) -> Path:
    """Write runs.csv, with one line per run, and return its path."""
    columns = columns_of(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_cell(column) for column in columns])
    writer.writerows(zip(*(map(csv_cell, values) for values in columns.values()), strict=True))
    path = ComparisonFolder(Path(results_dir)).runs_csv
    atomic_write_text(path, text.getvalue())
    return path


def csv_cell(value: Cell) -> str:
    """Return a cell: numbers exact, unknown values empty, text on one line, a ' before what looks like a formula."""
    if isinstance(value, str):
        return _text_cell(value)
    return "" if value is None else repr(value)


@functools.lru_cache
def _text_cell(text: str) -> str:
    text = sanitize(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "'")) else text


def read_runs_csv(path: Path) -> list[Record]:
    """Return the rows of a runs.csv as records that have nothing else; rows of schema version 1 have current names.

    Raises UserError for a file that cannot be read or is no table of runs.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = [with_current_names(row) for row in csv.DictReader(file, restval="")]
        records = [Record.from_json({"row": {name: _value(name, cell) for name, cell in row.items()}}) for row in rows]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, csv.Error) as error:
        raise UserError(f"{path} is not a table of runs: {error}") from None
    if any(record.row.get("launch") == "planned" for record in records):
        raise UserError(f"{path} has planned rows, which are no measurements to compare: name a table of runs alone")
    if not records or any(not row.row.get("run_id") or row.row.get("status") not in STATUSES for row in records):
        raise UserError(f"{path} is not a table of runs: every row of a runs.csv has a run_id and a status")
    return records


def _value(column: str, cell: str) -> Cell:
    """Return the value of a cell, in the type of its column."""
    kind = column_type(column)
    if cell == "":
        return None
    if kind is bool:
        return {"True": True, "False": False}.get(cell)
    return kind(cell) if kind in (int, float) else cell.removeprefix("'")
