"""The result store: one directory a run, each record written whole or not at all, with a version.

results/<name>/<run_id>/record.json   everything known of one run, whatever its end
results/<name>/runs.csv               a row a run, rebuilt from the records
"""

import csv
import functools
import io
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from harness.errors import UserError, one_line, printable
from harness.locks import is_held
from harness.redact import redacted
from harness.versions import is_stale, versions

Record = dict[str, Any]
Row = dict[str, Any]

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "refused", "timeout", "error", "interrupted")
RECORD_FILE = "record.json"

# The columns of runs.csv in order, with the type of their values. Bytes, counts and degrees are whole numbers.
COLUMN_TYPES: Mapping[str, type] = (
    dict.fromkeys(("run_id", "name", "status", "reason", "model"), str)
    | {"parameters": int}
    | dict.fromkeys(("strategy", "engine", "checkpointing", "precision"), str)
    | dict.fromkeys(("world_size", "dp_replicate", "dp_shard", "tp", "cp", "pp", "zero_stage"), int)
    | dict.fromkeys(("micro_batch", "grad_accumulation", "global_batch", "seq_len"), int)
    | dict.fromkeys(("tokens_per_second", "tokens_per_second_per_device", "step_seconds", "mfu"), float)
    | dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), int)
    | dict.fromkeys(("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"), int)
    | {"communication_bytes": int}
    | dict.fromkeys(("loss_first", "loss_last", "loss_deviation", "grad_deviation"), float)
    | {"predicted_peak_bytes": int, "predicted_step_seconds": float, "measured_on": str, "launch": str}
    # Beyond the columns promised to readers of the file. started_at: ISO 8601, UTC. peak_rank: the rank of
    # peak_allocated_bytes. seconds: the run from start to end. stale: filled when runs.csv is built.
    | {"repeat": int, "started_at": str, "seconds": float, "peak_rank": int, "stale": str}
    # What lies on the host: as asked, and bytes of model state there where the device has a memory of its own.
    | {"offload": str, "offloaded_bytes": int, "offload_activations": bool, "offloaded_activation_bytes": int}
    # By which means, and what tensor parallelism cuts.
    | {"data_parallel": str, "vocabulary_parallel": bool}
    # Of pipelines: idle over working time of all stages, and the papers'; the most passes in flight on a rank.
    | {"sequence_parallel": bool, "schedule": str, "virtual_stages": int, "layers_per_stage": str}
    | {"bubble": float, "bubble_formula": float, "in_flight": int}
    # Steps left out because a gradient overflowed, where the loss is scaled.
    | {"skipped_steps": int}
    # Where a run that is not ok ended, and the most that a rank said last it held.
    | {"phase": str, "last_allocated_bytes": int, "last_host_bytes": int}
    # Time: quantiles and spread (interquartile range over median) of the timed steps; of the median step the parts,
    # which add up to it, and what was hidden behind computing. disturbed: empty, or what disturbed the run.
    | {"step_seconds_p95": float, "step_seconds_spread": float, "disturbed": str}
    | dict.fromkeys(("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"), float)
    | dict.fromkeys(("exposed_communication_seconds", "idle_seconds", "other_seconds"), float)
    | {"overlapped_communication_seconds": float}
    # What is computed when, and by which implementations: attention's as it was heard on all ranks.
    | {"checkpointing_every": int, "loss_chunks": int, "compile": bool}
    | {"attention": str, "attention_kernel": str, "fused_optimizer": bool, "dropout": float}
    # Operations of a step over all ranks: the model's, without what is run again, and those that ran.
    | {"model_flops": int, "hardware_flops": int, "hfu": float, "model_flops_per_second_per_device": float}
    # Memory beyond tensors, and what the host gave.
    | {"allocation_retries": int, "out_of_memory_errors": int, "cpu_seconds": float, "joules_per_token": float}
    # What a rank could hold: its budget, else all of its GPU's memory.
    | {"memory_limit_bytes": int}
)
COLUMNS = tuple(COLUMN_TYPES)

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


class Found(NamedTuple):
    """What a results directory holds: records by their start, refused ones last; a line for each unreadable."""

    records: list[Record]
    problems: list[str]
    running: list[Record]  # as they were begun: a command is at these runs


def atomic_write_text(path: Path, text: str) -> None:
    atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Replace a file, or make it, in one step: whoever reads it, even after a crash, sees the old or the new whole."""
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def atomic_write_json(path: Path, value: Any) -> None:
    """As atomic_write_text; a number that is not finite becomes null, for JSON has none."""
    atomic_write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_record(run_dir: Path, record: Record) -> None:
    """Write a run's record: row, config, layout, ranks, environment, versions, proof, communication.

    None in the row is an unknown value, and so is a number that is not finite; a fraction of a byte is rounded. Secrets
    are left out (harness.redact): a reason may quote a library that quotes its environment.
    Raises ValueError naming the column of a value of the wrong type.
    """
    row = {key: _whole(key, value) for key, value in _finite(record["row"]).items()}
    record = redacted({"schema_version": SCHEMA_VERSION} | record | {"row": row})
    _check(record)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    atomic_write_json(Path(run_dir) / RECORD_FILE, record)


@functools.cache
def kind_of(column: str) -> type | None:
    """The type of a column's values: a row's own columns have any, except that bytes are whole numbers."""
    return int if column.endswith("_bytes") else COLUMN_TYPES.get(column)


def _whole(column: str, value: Any) -> Any:
    """A ring's mean share can be a fraction of a byte."""
    return round(value) if kind_of(column) is int and isinstance(value, float) else value


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
    kind = kind_of(column)
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
    path = Path(run_dir) / RECORD_FILE
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


def read_all(results_dir: Path) -> Found:
    """Every run under results/<name>/; single-process references and hidden folders are no runs of the comparison.

    Raises UserError if there is no such directory.
    """
    results_dir = Path(results_dir)
    if not results_dir.is_dir():
        raise UserError(f"{results_dir} is not a directory: name the folder of one comparison, results/NAME")
    found = Found([], [], [])
    for path in sorted(results_dir.glob(f"*/{RECORD_FILE}")):
        if path.parent.name == "references" or path.parent.name.startswith("."):
            continue
        try:
            record = read_record(path.parent)
            is_running = record["row"]["status"] == "interrupted" and is_held(path.parent)
            (found.running if is_running else found.records).append(record)
        except UserError as error:
            found.problems.append(str(error))
    found.records.sort(key=lambda record: _place(record["row"]))
    return found


def _place(row: Row) -> tuple[bool, str, str]:
    """In the order of their start, and after them what never started."""
    return row["status"] == "refused", row.get("started_at") or "", row["run_id"]


def rows_of(records: Iterable[Record]) -> list[Row]:
    """A row a record, with `stale` filled in."""
    now = versions()
    return [record["row"] | {"stale": "; ".join(is_stale(record, now)) or None} for record in records]


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
    path = Path(results_dir) / "runs.csv"
    atomic_write_text(path, text.getvalue())
    return path


def csv_cell(value: str | int | float | bool | None) -> str:
    """Numbers exact, unknown empty, text on one line and with ' before what a spreadsheet would take for a formula."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return repr(value)
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "'")) else text
