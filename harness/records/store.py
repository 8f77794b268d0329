"""The files of records: one folder per run, each record whole or not at all, and runs.csv, the rows of a comparison."""

import csv
import functools
import io
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from harness.records.checks import check_record
from harness.records.provenance import (
    command_text,
    commit_text,
    machine_text,
    origin_of_row,
    version_differences,
    versions_text,
)
from harness.records.rank_report import STATUSES
from harness.records.run_folder import ComparisonFolder, RunFolder
from harness.records.schema import COLUMNS, SCHEMA_VERSION, Cell, Record, Row, column_type, with_current_names
from harness.util.files import atomic_write_json, atomic_write_text, replace_non_finite
from harness.util.locks import is_locked
from harness.util.redact import redacted
from harness.util.text import UserError, join_words, one_line, sanitize

ABANDONED_SECONDS = 60  # after which nobody still writes a file


class LoadedRecords(NamedTuple):
    """The records of a comparison, sorted by the time of their start, with rejected runs last."""

    records: list[Record]
    problems: list[str]  # a line for each record that cannot be read
    running: list[Record]  # those that a command is working on, as they were when it started them


def write_record(run_dir: Path, record: Record | Mapping[str, Any]) -> None:
    """Write a run's record.

    None in the row is an unknown value, and a number that is not finite becomes one; a fraction of a byte is rounded.
    Secrets are left out (harness.util.redact), since a reason may quote a library that quotes its environment. Raises
    ValueError that names the column of a value of the wrong type. What a command that was killed left of an earlier
    writing is removed.
    """
    values = record.to_json() if isinstance(record, Record) else dict(record)
    row = {key: _of_column_type(key, value) for key, value in replace_non_finite(values["row"]).items()}
    version = {"schema_version": SCHEMA_VERSION}
    content = replace_non_finite(redacted(version | values | version | {"row": row}))
    check_record(content)
    run_dir.mkdir(parents=True, exist_ok=True)
    path = RunFolder(run_dir).record
    atomic_write_json(path, content)
    for unfinished in run_dir.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):  # another command may do the same
            if time.time() - unfinished.stat().st_mtime > ABANDONED_SECONDS:
                unfinished.unlink()


def _of_column_type(column: str, value: Any) -> Any:
    """Return a number in the type of its column.

    The mean bytes of a ring can have a fraction; the operations of a step on thousands of devices exceed 64 bits.
    """
    kind = column_type(column)
    if kind is int and isinstance(value, float):
        return round(value)
    return float(value) if kind is float and type(value) is int else value


def read_record(run_dir: Path) -> Record:
    """Return the record of a run; one of schema version 1 has the columns' current names.

    Raises UserError for a file that is missing, truncated, corrupt or of another schema version.
    """
    path = RunFolder(run_dir).record
    try:
        values = _parsed(path.read_bytes())
        if isinstance(values, dict) and values.get("schema_version") == 1 and isinstance(values.get("row"), dict):
            values |= {"schema_version": SCHEMA_VERSION, "row": with_current_names(values["row"])}
        check_record(values)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a whole record: {one_line(error)}; remove its folder and run again") from None
    record = Record.from_json(values)
    if record.row.get("launch") == "planned":
        raise UserError(f"{path} is a plan, and runs are compared with runs alone: remove it")
    return record


def read_run(folder: Path) -> Record:
    """Return the record in a folder that a user names. Raises UserError if it is not the folder of a run."""
    if not RunFolder(folder).record.exists():
        runs = fastest_runs(folder)
        choice = join_words(runs, "or") if runs else "one of results/NAME/RUN"
        raise UserError(f"{folder} is not the folder of a run: choose {choice}")
    return read_record(folder)


def fastest_runs(folder: Path) -> list[str]:
    """Return the folders of the three fastest runs of a comparison that ended ok; none if it is no comparison."""
    with suppress(UserError):
        ok = [record for record in read_runs(folder).records if record.status == "ok"]
        ok.sort(key=lambda record: record.row.get("tokens_per_second") or 0, reverse=True)
        return [str(folder / record.run_id) for record in ok[:3]]
    return []


def _parsed(content: bytes) -> Any:
    """Parse JSON with orjson, which is many times as fast as json.

    It rejects a lone surrogate, which JSON allows; such a character is replaced.
    """
    try:
        return orjson.loads(content)
    except ValueError:
        value = json.loads(content.decode("utf-8"), parse_constant=_reject_constant)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_all(results_dir: Path) -> LoadedRecords:
    """Return the records of all runs of a comparison, without references and hidden folders.

    Raises UserError if there is no such directory.
    """
    if not results_dir.is_dir():
        raise UserError(f"{results_dir} is not a directory: name the folder of one comparison, results/NAME")
    loaded = LoadedRecords([], [], [])
    for folder in ComparisonFolder(results_dir).recorded_runs():
        try:
            record = read_record(folder.path)
            is_running = record.status == "interrupted" and is_locked(folder.lock)
            (loaded.running if is_running else loaded.records).append(record)
        except UserError as error:
            loaded.problems.append(str(error))
    loaded.records.sort(key=lambda r: (r.status == "refused", r.row.get("started_at") or "", r.run_id))
    return loaded


def read_runs(path: Path) -> LoadedRecords:
    """Return the records of a comparison, and the rows of its runs.csv whose records are gone or cannot be read.

    Where there are records, rows that are not ok count as replaced. A path to a table gives its rows alone. Raises
    UserError if there is no such folder, and for a table that cannot be read and is all there is.
    """
    is_table = path.suffix == ".csv"
    table = path if is_table else ComparisonFolder(path).runs_csv
    loaded = LoadedRecords([], [], []) if is_table else read_all(path)
    known = {record.run_id for record in (*loaded.records, *loaded.running)}
    is_alone = is_table or (table.exists() and not (known or loaded.problems))
    with nullcontext() if is_alone else suppress(UserError):
        rows = read_runs_csv(table)
        loaded.records.extend(row for row in rows if row.run_id not in known and (is_alone or row.status == "ok"))
    return loaded


def readable_records(comparison: ComparisonFolder, pattern: str) -> Iterator[Record]:
    """Yield the records of the runs of this pattern that can be read."""
    for folder in comparison.recorded_runs(pattern):
        with suppress(UserError):
            yield read_record(folder.path)


def rows_of(records: Iterable[Record]) -> list[Row]:
    """Return one row per record, with columns on its origin: machine, versions, stale_reason, command and commit."""
    return [
        record.row
        | {"stale_reason": "; ".join(version_differences(record)) or None}
        | {"machine": machine_text(record), "versions": versions_text(record)}
        | {"command": command_text(record), "commit": commit_text(record)}
        for record in records
    ]


def columns_of(rows: Sequence[Row]) -> dict[str, list[Cell]]:
    """Return the values of the registered columns by name, followed by those of columns that only these rows have."""
    names = dict.fromkeys(itertools.chain(COLUMNS, *rows))
    return {name: [row.get(name) for row in rows] for name in names}


def write_runs_csv(results_dir: Path, rows: Sequence[Row]) -> Path:
    """Write runs.csv, with one line per run, and return its path."""
    columns = columns_of(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_cell(column) for column in columns])
    writer.writerows(zip(*(map(csv_cell, values) for values in columns.values()), strict=True))
    path = ComparisonFolder(results_dir).runs_csv
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
    """Return the rows of a runs.csv as records that have nothing else than what columns say of their origin.

    Rows of schema version 1 have current names.

    Raises UserError for a file that cannot be read or is no table of runs.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [with_current_names(row) for row in csv.DictReader(file, restval="")]
        values = [{name: _value(name, cell) for name, cell in row.items()} for row in rows]
        records = [Record.from_json({"row": row} | origin_of_row(row)) for row in values]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, csv.Error) as error:
        raise UserError(f"{path} is not a table of runs: {error}") from None
    if any(record.row.get("launch") == "planned" for record in records):
        raise UserError(f"{path} has planned rows, which cannot be compared: name a table of runs alone")
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
