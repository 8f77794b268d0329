"""The checks of a record's parts and columns, as it is written and as it is read."""

from typing import Any, get_type_hints

from harness.config.schema import RunConfig
from harness.records.derivation import Derivation
from harness.records.json_types import group_check, list_check, type_check
from harness.records.rank_report import STATUSES, RankReport
from harness.records.run_folder import is_run_id
from harness.records.schema import COLUMNS, SCHEMA_VERSION, Record, column_type

# Keys that reports read of the entries of a record's lists, and of the predicted step: all are required.
_SENT = {"operation": str, "axis": str, "bytes": float, "count": int}
_TRAFFIC = {"axis": str, "bytes": float, "formula_bytes": float | None, "outside": dict[str, float]}
_STAGES = dict.fromkeys(
    ("rank", "in_flight", "activation_bytes", "working_seconds", "idle_seconds", "bubble"), float
) | dict.fromkeys(("stages", "layers"), list[int])
_STEP = dict.fromkeys(("step_seconds", "low_seconds", "high_seconds"), float) | {"exposed_seconds": dict[str, float]}

# The checks of a record's parts by their keys; a row is checked by its columns.
_PARTS = {
    key: type_check(hint)
    for key, hint in get_type_hints(Record).items()
    if key in ("layout", "versions", "commit", "proof", "notes", "corpus")
} | {
    "config": group_check(  # within a group, any key may be the one that is impossible
        dict.fromkeys(("model", "strategy", "checkpointing", "precision", "data", "cluster", "train"), dict[str, Any])
        | {"command_line": str}
    ),
    "environment": group_check(
        dict.fromkeys(("devices", "nodes", "cores", "threads"), int) | {"variables": dict[str, str]}
    ),
    "ranks": type_check(list[RankReport]),
    "derivations": type_check(dict[str, Derivation]),
    "predicted_step": group_check(_STEP, _STEP),
    "communication": list_check(group_check(_SENT | {"sizes": dict[int, int], "dtype": str}, _SENT)),
    "traffic": list_check(group_check(_TRAFFIC, _TRAFFIC)),
    "pipeline": list_check(group_check(_STAGES, _STAGES)),
}

_check_config = type_check(RunConfig)  # of a run whose layout could be resolved; of others any key may be the wrong one

# The types of the columns whose values may be all that their type has; an integer must fit 64 bits.
_PLAIN_TYPES = {name: column.type for name, column in COLUMNS.items() if column.type is not int}
# What the values of a column may be, by its type; None is that of a column that can have any.
_ALLOWED_TYPES: dict[type | None, tuple[type, ...]] = {
    **{kind: (kind,) for kind in (str, int, bool)},
    float: (int, float),
    None: (str, int, float, bool),
}


def check_record(record: Any) -> None:
    """Raise ValueError if this is not a record of the current schema."""
    if not isinstance(record, dict) or not isinstance(record.get("row"), dict):
        raise ValueError("it is not a record with a row")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version={record.get('schema_version')} is not {SCHEMA_VERSION}")
    row = record["row"]
    if row.get("status") not in STATUSES or not is_run_id(row.get("run_id")):
        raise ValueError(f"run_id={row.get('run_id')} with status={row.get('status')} is not the row of a run")
    for column, value in row.items():
        if value is not None and type(value) is not _PLAIN_TYPES.get(column):
            _check_value(column, value)
    for part, check in _PARTS.items():
        if record.get(part) is not None and (problem := check(record[part])):
            raise ValueError(f"{part}{problem}")
    if record.get("layout") and record.get("config") and (problem := _check_config(record["config"])):
        raise ValueError(f"config{problem}")


def _check_value(column: str, value: Any) -> None:
    kind = column_type(column)
    if not isinstance(value, _ALLOWED_TYPES[kind]) or (kind in (int, float) and isinstance(value, bool)):
        raise ValueError(f"{column}={value!r} is not a value of type {kind.__name__ if kind else 'scalar'}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{column}={value} does not fit 64 bits")
