"""Records as one pandas frame: typed columns, a label for every row, and ratios to the row it is compared with."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pandas as pd

from harness.records.columns import COLUMN_TYPES
from harness.records.provenance import version_differences, versions
from harness.records.schema import Record, Row
from harness.report.labels import (
    DEFAULTS,
    IMPLIED_BY_STRATEGY,
    OTHER_OPTIONS,
    VARYING,
    labels,
    other_differences,
    value_text,
)
from harness.report.ranking import common_baseline
from harness.report.speeds import are_alike, speed_of
from harness.report.text import pluralize

T = TypeVar("T")

STATE_COLUMNS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")

MEMORY_COLUMNS = (*STATE_COLUMNS, "activation_bytes", "peak_allocated_bytes")

RATIO_COLUMNS = ("peak_allocated_bytes", "tokens_per_second", "communication_bytes")

_DTYPES: dict[type | None, Any] = {str: object, bool: "boolean", int: "Int64", float: "Float64", None: object}


def labelled(table: pd.DataFrame, values: Iterable[T]) -> list[tuple[str, T]]:
    """Return the values of a frame's rows, each behind the label of its row."""
    return list(zip(column_values(table, "label"), values, strict=True))


def records_frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return a frame with one row per record, in the given order; unknown values are NA.

    These columns are added to those of the records:

    - `state_bytes`: parameters, gradients and optimizer state together;
    - `stale_reason`: what differs between the record's versions and the installed ones;
    - `otherwise`: the differing configuration keys of rows that no column distinguishes;
    - `label`: the unique name of the row;
    - `baseline`: the label of the one row that all ratios refer to, for the rows that are comparable with it;
    - `<column>_ratio`: its value over the baseline's; of speed only where both may be ranked;
    - `speed_low`, `speed_high`: the slowest and the fastest run of a speed that may be ranked;
    - `is_crowded`: whether its ranks shared processor cores, so that its speed is not ranked;
    - `is_ignored`: whether its speed and times are disturbed or barely timed;
    - `unsettled`: whether its speed differs from the baseline's by no more than runs vary.

    Repeated runs are a row each: `records_frame(merge_repeats(records))` has one row for all repeats.
    """
    rows: list[Row] = [record.row for record in records]
    names: dict[str, Any] = dict.fromkeys(COLUMN_TYPES)
    for row in rows:
        names |= dict.fromkeys(row)
    columns = {name: pd.array([row.get(name) for row in rows], dtype=_DTYPES[COLUMN_TYPES.get(name)]) for name in names}
    table = pd.DataFrame(columns)
    installed = versions()
    table["stale_reason"] = ["; ".join(version_differences(record, installed)) or None for record in records]
    table["state_bytes"] = table[list(STATE_COLUMNS)].astype("Float64").sum(axis=1, skipna=False).astype("Int64")
    varying = varying_columns(table)
    table[OTHER_OPTIONS] = other_differences(records, varying)
    line_labels = labels(rows, varying, table[OTHER_OPTIONS].tolist())
    table["label"] = line_labels
    baseline, compared = common_baseline(records)
    table["baseline"] = [line_labels[baseline or 0] if position in compared else None for position in range(len(rows))]
    for name in dict.fromkeys((*MEMORY_COLUMNS, *RATIO_COLUMNS)):
        table[f"{name}_ratio"] = pd.array(_ratios(column_values(table, name), baseline, compared), dtype="Float64")
    return _with_speeds(table, records, baseline, compared)


def _with_speeds(
    table: pd.DataFrame, records: Sequence[Record], baseline: int | None, compared: Collection[int]
) -> pd.DataFrame:
    """Add the columns of speeds that depend on the repeats, and blank the ratios of speeds that cannot be ranked."""
    speeds = [speed_of(record.runs or [record]) for record in records]
    ranked = [speed if speed and speed.is_ranked else None for speed in speeds]
    base = None if baseline is None else ranked[baseline]
    has_ratio = [position in compared and bool(base and speed) for position, speed in enumerate(ranked)]
    table["tokens_per_second_ratio"] = table["tokens_per_second_ratio"].where(pd.Series(has_ratio, index=table.index))
    lows = [None if speed is None else speed.low for speed in ranked]
    highs = [None if speed is None else speed.high for speed in ranked]
    table["speed_low"], table["speed_high"] = pd.array(lows, dtype="Float64"), pd.array(highs, dtype="Float64")
    table["is_crowded"] = [bool(speed and speed.is_crowded) for speed in speeds]
    table["is_ignored"] = [bool(speed and speed.is_disturbed) for speed in speeds]
    table["unsettled"] = [
        bool(speed and base and compares and position != baseline and are_alike(speed, base))
        for position, (speed, compares) in enumerate(zip(ranked, has_ratio, strict=True))
    ]
    return table


def column_values(table: pd.DataFrame, name: str) -> list[Any]:
    """Return a column as plain values, None where unknown. A column that no record has is unknown everywhere."""
    if name not in table:
        return [None] * len(table)
    values: list[Any] = table[name].tolist()
    is_missing = table[name].isna()
    if not is_missing.any():
        return values
    return [None if missing else value for value, missing in zip(values, is_missing.tolist(), strict=True)]


def distinct_values(table: pd.DataFrame, name: str) -> list[Any]:
    """Return the different known values of a column, in the order of their first rows."""
    values: list[Any] = table[name].dropna().unique().tolist() if name in table else []
    return values


def _settings(table: pd.DataFrame, name: str) -> list[Any]:
    """Return the different values of a setting; None is one of them where it is the default."""
    values = dict.fromkeys(column_values(table, name))
    return [value for value in values if value is not None or DEFAULTS.get(name, "") is None]


def varying_columns(table: pd.DataFrame) -> list[str]:
    """Return the columns that differ between rows, without those that strategy and ranks determine."""
    by_strategy = table.groupby(["strategy", "world_size"])
    return [
        name
        for name in VARYING
        if (by_strategy[name].nunique().gt(1).any() if name in IMPLIED_BY_STRATEGY else len(_settings(table, name)) > 1)
    ]


def _ratios(column: Sequence[Any], baseline: int | None, compared: Collection[int]) -> list[float | None]:
    """Return each compared row's value over the baseline's, None where either is unknown or the baseline's is 0."""
    base = None if baseline is None else column[baseline]
    return [
        value / base if base and value is not None and position in compared else None
        for position, value in enumerate(column)
    ]


def baseline_name(table: pd.DataFrame) -> str:
    """Return the label of the row that all ratios refer to; empty where no other row is compared with it."""
    baselines = column_values(table, "baseline")
    pairs = labelled(table, baselines)
    return next((base for label, base in pairs if base not in (None, label)), "")


def labels_by_kernel(table: pd.DataFrame) -> dict[str, list[str]]:
    """Return the labels of rows by their attention kernel; empty if all have one, as rows should."""
    groups = labels_by(table, "attention_kernel") if "attention_kernel" in table else {}
    return groups if len(groups) > 1 else {}


def compared_layers(record: Record) -> str:
    """Return how many of its layers a run was compared on with a single process, such as 2 of 4; '' where on all."""
    layers, all_layers = record.row.get("reference_layers"), (record.config.get("model") or {}).get("num_hidden_layers")
    return f"{layers} of {all_layers}" if layers and all_layers and layers < all_layers else ""


def labels_by(table: pd.DataFrame, name: str) -> dict[str, list[str]]:
    """Return the labels of rows by the value of a text column, without the rows where it is empty or unknown."""
    return labels_of(labelled(table, column_values(table, name)))


def labels_of(values: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the labels of rows by their values, without those where it is empty or unknown."""
    groups: dict[str, list[str]] = {}
    for label, value in values:
        if value:
            groups.setdefault(value, []).append(label)
    return groups


def shared_settings(table: pd.DataFrame) -> list[str]:
    """Return a phrase for each setting that all rows share; settings that vary are left to the columns."""
    distinct = {name: _settings(table, name) for name in (*VARYING, "parameters", "checkpointing")}
    shared = {name: values[0] for name, values in distinct.items() if len(values) == 1}
    size = f" ({shared['parameters']:,} parameters)" if "parameters" in shared else ""
    has_tokens = {"global_batch", "seq_len"} <= shared.keys()
    tokens = shared["global_batch"] * shared["seq_len"] if has_tokens else 0
    phrases = [
        f"{shared['model']}{size}" if "model" in shared else "",
        f"{shared['precision']}" if "precision" in shared else "",
        f"checkpointing {shared['checkpointing']}" if "checkpointing" in shared else "",
        pluralize(shared["world_size"], "rank") if "world_size" in shared else "",
        f"{shared['global_batch']} × {shared['seq_len']} = {tokens:,} tokens per step" if has_tokens else "",
        f"micro-batch {shared['micro_batch']}" if "micro_batch" in shared else "",
        f"on {shared['measured_on']}" if "measured_on" in shared else "",
        f"ranks launched as {shared['launch']}" if "launch" in shared else "",
    ]
    phrases += [
        f"{'checkpointing ' * (name == 'checkpointing_every')}{value_text(name, shared[name])}"
        for name, default in DEFAULTS.items()
        if shared.get(name, default) != default
    ]
    return [phrase for phrase in phrases if phrase]
