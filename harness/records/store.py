"""The result store: one directory a run, each record written whole or not at all, with a version.

results/<name>/<run_id>/record.json   everything known of one run, whatever its end
results/<name>/runs.csv               a row a run, rebuilt from the records
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from harness.records.run_folder import ComparisonFolder, RunFolder
from harness.records.schema import SCHEMA_VERSION, STATUSES, Record, Row, column_type
from harness.util.errors import UserError
from harness.util.files import atomic_write_json, finite
from harness.util.locks import is_locked
from harness.util.redact import redacted
from harness.util.text import one_line

# Lists in a record, and the keys of their entries that a report reads.
_LISTS = {
    "ranks": (),
    "communication": ("operation", "axis", "bytes", "count"),
    "pipeline": (
        "rank",
        "stages",
        "layers",
        "working_seconds",
        "idle_seconds",
        "bubble",
        "in_flight",
        "activation_bytes",
    ),
}


class LoadedRecords(NamedTuple):
    """What a results directory holds: records by their start, refused ones last; a line for each unreadable."""

    records: list[Record]
    problems: list[str]
    running: list[Record]  # as they were begun: a command is at these runs


def write_record(run_dir: Path, record: Record) -> None:
    """Write a run's record: row, config, layout, ranks, environment, versions, proof, communication.

    None in the row is an unknown value, and so is a number that is not finite; a fraction of a byte is rounded. Secrets
    are left out (harness.redact): a reason may quote a library that quotes its environment.
    Raises ValueError naming the column of a value of the wrong type.
    """
    row = {key: _round_bytes(key, value) for key, value in finite(record["row"]).items()}
    record = redacted({"schema_version": SCHEMA_VERSION} | record | {"row": row})
    _check(record)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    atomic_write_json(RunFolder(Path(run_dir)).record, record)


def _round_bytes(column: str, value: Any) -> Any:
    """A ring's mean share can be a fraction of a byte."""
    return round(value) if column_type(column) is int and isinstance(value, float) else value


def _check(record: Any) -> None:
    """Raises ValueError if this is not a record of this schema."""
    if not isinstance(record, dict) or not isinstance(record.get("row"), dict):
        raise ValueError("it is not a record with a row")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version={record.get('schema_version')} is not {SCHEMA_VERSION}")
    row = record["row"]
    if row.get("status") not in STATUSES or not row.get("run_id"):
        raise ValueError(f"run_id={row.get('run_id')} with status={row.get('status')} is not the row of a run")
    for column, value in row.items():
        if value is not None:
            _check_value(column, value)
    for part in ("environment", "versions", "proof"):
        if not isinstance(record.get(part, {}), dict):
            raise ValueError(f"{part} is not a group of keys")
    for part, keys in _LISTS.items():
        entries = record.get(part, [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) and set(keys) <= e.keys() for e in entries):
            raise ValueError(f"{part} is not a list of groups with the keys {', '.join(keys) or 'of a rank'}")


def _check_value(column: str, value: Any) -> None:
    kind = column_type(column)
    if type(value) is kind and (not isinstance(value, int) or -(2**63) <= value < 2**63):
        return
    allowed = (str, int, float, bool) if kind is None else (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (kind in (int, float) and isinstance(value, bool)):
        raise ValueError(f"{column}={value!r} is not a value of type {kind.__name__ if kind else 'scalar'}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{column}={value} does not fit 64 bits")


def read_record(run_dir: Path) -> Record:
    """The record of a run.

    Raises UserError for a file that is missing, truncated, corrupt or of another schema version.
    """
    path = RunFolder(Path(run_dir)).record
    try:
        record = _parsed(path.read_bytes())
        _check(record)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a whole record: {one_line(error)}; remove its folder and run again") from None
    return dict(record)


def _parsed(content: bytes) -> Any:
    """By orjson, many times as fast; what it refuses may still be JSON: half a surrogate pair, here replaced."""
    try:
        return orjson.loads(content)
    except ValueError:
        value = json.loads(content.decode("utf-8"), parse_constant=_reject_constant)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_all(results_dir: Path) -> LoadedRecords:
    """Every run under results/<name>/; single-process references and hidden folders are no runs of the comparison.

    Raises UserError if there is no such directory.
    """
    results_dir = Path(results_dir)
    if not results_dir.is_dir():
        raise UserError(f"{results_dir} is not a directory: name the folder of one comparison, results/NAME")
    found = LoadedRecords([], [], [])
    for folder in ComparisonFolder(results_dir).recorded_runs():
        try:
            record = read_record(folder.path)
            is_running = record["row"]["status"] == "interrupted" and is_locked(folder.lock)
            (found.running if is_running else found.records).append(record)
        except UserError as error:
            found.problems.append(str(error))
    found.records.sort(key=lambda record: _sort_key(record["row"]))
    return found


def _sort_key(row: Row) -> tuple[bool, str, str]:
    """In the order of their start, and after them what never started."""
    return row["status"] == "refused", row.get("started_at") or "", row["run_id"]
