"""Records as one pandas frame: typed columns, a label for every row, and ratios to the row it is compared with."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from harness.records.columns import COLUMN_TYPES
from harness.records.provenance import version_differences, versions
from harness.records.schema import Record, Row
from harness.report.comparability import comparability_key, group_by
from harness.report.labels import (
    DEFAULTS,
    IMPLIED_BY_STRATEGY,
    OTHER_OPTIONS,
    VARYING,
    labels,
    non_default,
    other_differences,
    value_text,
)
from harness.report.spread import is_unsettled, spread

STATE_COLUMNS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")

MEMORY_COLUMNS = (*STATE_COLUMNS, "activation_bytes", "peak_allocated_bytes")

RATIO_COLUMNS = ("peak_allocated_bytes", "tokens_per_second", "communication_bytes")

_DTYPES: dict[type | None, Any] = {str: object, bool: "boolean", int: "Int64", float: "Float64", None: object}


def records_frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return a frame with one row per record, in the given order; unknown values are NA.

    These columns are added to those of the records:

    - `state_bytes`: parameters, gradients and optimizer state together;
    - `stale_reason`: what differs between the record's versions and the installed ones;
    - `otherwise`: the differing configuration keys of rows that no column distinguishes;
    - `label`: the unique name of the row;
    - `baseline`: the label of the row that it is compared with;
    - `<column>_ratio`: its value over the baseline's;
    - `unsettled`: whether the ratio of speed lies within the spread.

    Repeated runs are a row each: `records_frame(merge_repeats(records))` has one row for all repeats.
    """
    rows: list[Row] = [record.row for record in records]
    names = dict.fromkeys((*COLUMN_TYPES, *(name for row in rows for name in row)))
    columns = {name: pd.array([row.get(name) for row in rows], dtype=_DTYPES[COLUMN_TYPES.get(name)]) for name in names}
    table = pd.DataFrame(columns)
    installed = versions()
    table["stale_reason"] = ["; ".join(version_differences(record, installed)) or None for record in records]
    table["state_bytes"] = table[list(STATE_COLUMNS)].astype("Float64").sum(axis=1, skipna=False).astype("Int64")
    varying = varying_columns(table)
    table[OTHER_OPTIONS] = other_differences(records, varying)
    line_labels = labels(rows, varying, table[OTHER_OPTIONS].tolist())
    baselines = _baselines(rows)
    table["label"] = line_labels
    table["baseline"] = [None if baseline is None else line_labels[baseline] for baseline in baselines]
    for name in dict.fromkeys((*MEMORY_COLUMNS, *RATIO_COLUMNS)):
        table[f"{name}_ratio"] = pd.array(_ratios(column_values(table, name), baselines), dtype="Float64")
    table["unsettled"] = _unsettled(rows, column_values(table, "tokens_per_second_ratio"), baselines)
    return table


def column_values(table: pd.DataFrame, name: str) -> list[Any]:
    """Return a column as plain values, None where unknown. A column that no record has is unknown everywhere."""
    if name not in table:
        return [None] * len(table)
    return [None if value is None or pd.isna(value) else value for value in table[name].tolist()]


def distinct_values(table: pd.DataFrame, name: str) -> list[Any]:
    """Return the different known values of a column, in the order of their first rows."""
    return list(dict.fromkeys(value for value in column_values(table, name) if value is not None))


def varying_columns(table: pd.DataFrame) -> list[str]:
    """Return the columns that differ between rows, without those that strategy and world size determine."""
    by_strategy = table.groupby(["strategy", "world_size"])
    return [
        name
        for name in VARYING
        if (
            by_strategy[name].nunique().gt(1).any()
            if name in IMPLIED_BY_STRATEGY
            else len(distinct_values(table, name)) > 1
        )
    ]


def _baselines(rows: Sequence[Row]) -> list[int | None]:
    """Return for each row that is ok the position of the row it is compared with, and None for the others."""
    ok = [position for position, row in enumerate(rows) if row["status"] == "ok"]
    baselines: list[int | None] = [None] * len(rows)
    for peers in group_by(ok, lambda position: comparability_key(rows[position])).values():
        by_world = {world: _baseline(world, peers, rows) for world in {rows[peer].get("world_size") for peer in peers}}
        for peer in peers:
            baselines[peer] = by_world[rows[peer].get("world_size")]
    return baselines


def _baseline(world: int | None, peers: Sequence[int], rows: Sequence[Row]) -> int:
    """Return the peer to compare a world size with: `ddp` on as many ranks, else `single`, else the first.

    A single process is compared with the only `ddp` there is. Among several candidates the one without checkpointing
    and with the fewest options that are not their defaults is chosen.
    """
    ddp = [peer for peer in peers if rows[peer].get("strategy") == "ddp"]
    same_world = [peer for peer in peers if rows[peer].get("world_size") == world]
    only_ddp = world == 1 and len({rows[peer].get("world_size") for peer in ddp}) == 1
    single = [peer for peer in peers if rows[peer].get("strategy") == "single"]
    candidates = (ddp if only_ddp else [peer for peer in ddp if rows[peer].get("world_size") == world]) or single

    def variations(peer: int) -> tuple[bool, int]:
        return rows[peer].get("checkpointing") not in (None, "none"), len(non_default(rows[peer]))

    return min(candidates or same_world, key=variations)


def _ratios(column: Sequence[Any], baselines: Sequence[int | None]) -> list[float | None]:
    """Return each row's value over its baseline's, None where either is unknown or the baseline's is 0."""
    ratios: list[float | None] = []
    for value, baseline in zip(column, baselines, strict=True):
        base = None if baseline is None else column[baseline]
        ratios.append(value / base if value is not None and base else None)
    return ratios


def _unsettled(rows: Sequence[Row], ratios: Sequence[float | None], baselines: Sequence[int | None]) -> list[bool]:
    """Return for each row whether its ratio of speed is unsettled; a baseline against itself is settled."""
    return [
        baseline not in (None, position) and is_unsettled(ratio, spread(row), spread(rows[baseline]))
        for position, (row, ratio, baseline) in enumerate(zip(rows, ratios, baselines, strict=True))
    ]


def baseline_names(table: pd.DataFrame) -> str:
    """Return the labels of the baselines, for a title; empty where no row is compared with another one."""
    baselines = column_values(table, "baseline")
    pairs = zip(column_values(table, "label"), baselines, strict=True)
    has_other = any(base not in (None, label) for label, base in pairs)
    return ", ".join(distinct_values(table, "baseline")) if has_other else ""


def labels_by_kernel(table: pd.DataFrame) -> dict[str, list[str]]:
    """Return the labels of rows by their attention kernel; empty if all have one, as rows should."""
    groups = labels_by(table, "attention_kernel") if "attention_kernel" in table else {}
    return groups if len(groups) > 1 else {}


def labels_by_staleness(table: pd.DataFrame) -> dict[str, list[str]]:
    """Return the labels of stale rows by what differs in their versions."""
    return labels_by(table, "stale_reason")


def labels_by(table: pd.DataFrame, name: str) -> dict[str, list[str]]:
    """Return the labels of rows by the value of a text column, without the rows where it is empty or unknown."""
    groups: dict[str, list[str]] = {}
    for label, value in zip(column_values(table, "label"), column_values(table, name), strict=True):
        if value:
            groups.setdefault(value, []).append(label)
    return groups


def shared_settings(table: pd.DataFrame) -> list[str]:
    """Return a phrase for each setting that all rows share; settings that vary are left to the columns."""
    distinct = {name: distinct_values(table, name) for name in (*VARYING, "parameters", "checkpointing")}
    shared = {name: values[0] for name, values in distinct.items() if len(values) == 1}
    phrases: list[str] = []
    if "model" in shared:
        size = f" ({shared['parameters']:,} parameters)" if "parameters" in shared else ""
        phrases.append(shared["model"] + size)
    phrases += [shared["precision"]] if "precision" in shared else []
    phrases += [f"checkpointing {shared['checkpointing']}"] if "checkpointing" in shared else []
    phrases += [f"world size {shared['world_size']}"] if "world_size" in shared else []
    if "global_batch" in shared and "seq_len" in shared:
        tokens = shared["global_batch"] * shared["seq_len"]
        phrases.append(f"{shared['global_batch']} × {shared['seq_len']} = {tokens:,} tokens per step")
    phrases += [f"micro-batch {shared['micro_batch']}"] if "micro_batch" in shared else []
    phrases += [f"on {shared['measured_on']}"] if "measured_on" in shared else []
    phrases += [f"ranks launched as {shared['launch']}"] if "launch" in shared else []
    phrases += [
        value_text(name, shared[name]) for name, default in DEFAULTS.items() if shared.get(name, default) != default
    ]
    return phrases
