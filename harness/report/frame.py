"""Records as one pandas frame: typed columns, what they are measured against, and numbers as text in one unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.config.byte_size import BINARY
from harness.records.provenance import version_differences, versions
from harness.records.schema import COLUMN_TYPES, Record, Row
from harness.report.labels import (
    DEFAULTS,
    SAID_BY_STRATEGY,
    VARYING,
    labels,
    non_default,
    other_differences,
    value_text,
)
from harness.report.spread import is_unsettled, spread

# Runs are comparable, and a ratio between them means something, where all of these are equal.
_SETTING = ("model", "parameters", "precision", "global_batch", "seq_len", "measured_on", "launch")

MODEL_STATE = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")

MEMORY = (*MODEL_STATE, "activation_bytes", "peak_allocated_bytes")

RATIOS = ("peak_allocated_bytes", "tokens_per_second", "communication_bytes")

_DTYPES: dict[type | None, Any] = {str: object, bool: "boolean", int: "Int64", float: "Float64", None: object}


@dataclass(frozen=True)
class Unit:
    name: str
    size: float  # in the column's own unit


def records_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a record, in the given order: its columns, unknown values NA, and what follows from them.

    Added are `state_bytes`, `stale` (what differs in versions), `otherwise` (what of the configuration differs in rows
    that no column tells apart), `label` (what tells the row apart), `baseline` (the label of the row it is measured
    against), `<column>_ratio` to that row, and `unsettled`: whether the ratio of speed is within the spread. Repeated
    runs are a row each; frame(merged(records)) has a row for all repeats.
    """
    rows: list[Row] = [record["row"] for record in records]
    names = dict.fromkeys((*COLUMN_TYPES, *(name for row in rows for name in row)))
    columns = {name: pd.array([row.get(name) for row in rows], dtype=_DTYPES[COLUMN_TYPES.get(name)]) for name in names}
    table = pd.DataFrame(columns)
    now = versions()
    table["stale"] = ["; ".join(version_differences(record, now)) or None for record in records]
    table["state_bytes"] = table[list(MODEL_STATE)].astype("Float64").sum(axis=1, skipna=False).astype("Int64")
    varying = varying_columns(table)
    table["otherwise"] = other_differences(records, varying)
    line_labels = labels(rows, varying, table["otherwise"].tolist())
    baselines = _baselines(rows)
    table["label"] = line_labels
    table["baseline"] = [None if baseline is None else line_labels[baseline] for baseline in baselines]
    for name in dict.fromkeys((*MEMORY, *RATIOS)):
        table[f"{name}_ratio"] = pd.array(_ratios(values(table, name), baselines), dtype="Float64")
    table["unsettled"] = _unsettled(rows, values(table, "tokens_per_second_ratio"), baselines)
    return table


def values(table: pd.DataFrame, name: str) -> list[Any]:
    """A column as plain values, None where unknown; a column that no record has is unknown everywhere."""
    if name not in table:
        return [None] * len(table)
    return [None if value is None or pd.isna(value) else value for value in table[name].tolist()]


def known(table: pd.DataFrame, name: str) -> list[Any]:
    """The different values of a column, in order, without the unknown."""
    return list(dict.fromkeys(value for value in values(table, name) if value is not None))


def varying_columns(table: pd.DataFrame) -> list[str]:
    alike = table.groupby(["strategy", "world_size"])
    return [
        name
        for name in VARYING
        if (alike[name].nunique().gt(1).any() if name in SAID_BY_STRATEGY else len(known(table, name)) > 1)
    ]


def comparability_key(row: Row) -> tuple[Any, ...]:
    """Equal for rows whose figures mean the same."""
    return tuple(row.get(key) for key in _SETTING)


def _baselines(rows: Sequence[Row]) -> list[int | None]:
    """Of each row that is ok the position of the one it is measured against, None for the others."""
    settings: dict[tuple[Any, ...], list[int]] = {}
    for position, row in enumerate(rows):
        if row["status"] == "ok":
            settings.setdefault(comparability_key(row), []).append(position)
    found: list[int | None] = [None] * len(rows)
    for peers in settings.values():
        by_world = {world: _baseline(world, peers, rows) for world in {rows[peer].get("world_size") for peer in peers}}
        for peer in peers:
            found[peer] = by_world[rows[peer].get("world_size")]
    return found


def _baseline(world: int | None, peers: Sequence[int], rows: Sequence[Row]) -> int:
    """Of the peers the one to measure a world against: ddp on as many ranks, else single, else the first.

    A single process is held against the only ddp there is. Of several the first without checkpointing, and with what
    is optional as it usually is.
    """
    ddp = [peer for peer in peers if rows[peer].get("strategy") == "ddp"]
    same_world = [peer for peer in peers if rows[peer].get("world_size") == world]
    lone = world == 1 and len({rows[peer].get("world_size") for peer in ddp}) == 1
    single = [peer for peer in peers if rows[peer].get("strategy") == "single"]
    candidates = (ddp if lone else [peer for peer in ddp if rows[peer].get("world_size") == world]) or single

    def variations(peer: int) -> tuple[bool, int]:
        return rows[peer].get("checkpointing") not in (None, "none"), len(non_default(rows[peer]))

    return min(candidates or same_world, key=variations)


def _ratios(column: Sequence[Any], baselines: Sequence[int | None]) -> list[float | None]:
    """Each row's value over its baseline's, None where either is unknown or there is nothing to divide by."""
    ratios: list[float | None] = []
    for value, baseline in zip(column, baselines, strict=True):
        base = None if baseline is None else column[baseline]
        ratios.append(value / base if value is not None and base else None)
    return ratios


def _unsettled(rows: Sequence[Row], ratios: Sequence[float | None], baselines: Sequence[int | None]) -> list[bool]:
    """A baseline beside itself is settled."""
    return [
        baseline not in (None, position) and is_unsettled(ratio, spread(row), spread(rows[baseline]))
        for position, (row, ratio, baseline) in enumerate(zip(rows, ratios, baselines, strict=True))
    ]


def baseline_names(table: pd.DataFrame) -> str:
    """What the ratios are to, for a title; empty where no row has another to be held against."""
    baselines = values(table, "baseline")
    pairs = zip(values(table, "label"), baselines, strict=True)
    return ", ".join(known(table, "baseline")) if any(base not in (None, label) for label, base in pairs) else ""


def attention_kernels(table: pd.DataFrame) -> dict[str, list[str]]:
    """The labels of rows by their attention kernel, where there are several: then more differs than the strategies."""
    found = labels_by(table, "attention_kernel") if "attention_kernel" in table else {}
    return found if len(found) > 1 else {}


def stale_rows(table: pd.DataFrame) -> dict[str, list[str]]:
    """The labels of stale rows by what differs in their versions."""
    return labels_by(table, "stale")


def labels_by(table: pd.DataFrame, name: str) -> dict[str, list[str]]:
    """The labels of the rows by what a column of words says of them; rows of which it says nothing are left out."""
    found: dict[str, list[str]] = {}
    for label, what in zip(values(table, "label"), values(table, name), strict=True):
        if what:
            found.setdefault(what, []).append(label)
    return found


def byte_unit(numbers: Sequence[float | None]) -> Unit:
    """The unit for a whole table of bytes: the largest of them is 1 or more of it."""
    largest = max((abs(number) for number in numbers if number is not None), default=0)
    for name, size in BINARY.items():
        if largest >= size:
            return Unit(name, size)
    return Unit("B", 1)


def operation_unit(numbers: Sequence[float | None]) -> Unit:
    """The unit for a whole column of operations: the largest of them is 1 or more of it."""
    largest = max((number for number in numbers if number is not None), default=0)
    sizes = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9))
    return next((Unit(name, size) for name, size in sizes if largest >= size), Unit("MFLOP", 1e6))


MILLISECONDS = Unit("ms", 1e-3)  # of seconds

ONE = Unit("", 1)


def bytes_text(size: float) -> str:
    """One size with the unit that suits it."""
    unit = byte_unit([size])
    return f"{scaled([size], unit)[0]} {unit.name}"


def scaled(numbers: Sequence[float | None], unit: Unit) -> list[str]:
    """A column of numbers with as many decimals as its largest needs for three figures; unknown empty.

    What is not zero never reads as zero.
    """
    largest = max((abs(number) for number in numbers if number is not None), default=0) / unit.size
    decimals = 0 if largest >= 1000 or unit.name == "B" else 1 if largest >= 100 else 2
    return [_number(number, unit.size, decimals) for number in numbers]


def ratios(numbers: Sequence[float | None]) -> list[str]:
    return [_number(number, 1, 2) for number in numbers]


def fractions(numbers: Sequence[float | None]) -> list[str]:
    """Such as a bubble of 1/64, with three decimals."""
    return [_number(number, 1, 3) for number in numbers]


def percents(numbers: Sequence[float | None]) -> list[str]:
    return [_number(number, 0.01, 1) for number in numbers]


def _number(number: float | None, size: float, decimals: int) -> str:
    if number is None:
        return ""
    smallest = 10.0**-decimals
    if 0 < number / size < smallest / 2:
        return f"<{smallest:.{decimals}f}"
    return f"{number / size:,.{decimals}f}"


def counted(number: int, noun: str) -> str:
    """1 line, 2 lines."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def deviations(numbers: Sequence[float | None]) -> list[str]:
    """Relative differences as 1.2e-7."""
    return ["" if number is None else _deviation(number) for number in numbers]


def _deviation(number: float) -> str:
    if number == 0:
        return "0"
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def summary(table: pd.DataFrame) -> list[str]:
    """What all rows share, a phrase each; what varies is left to the columns."""
    shared = {name: known(table, name) for name in (*VARYING, "parameters", "checkpointing")}
    one = {name: found[0] for name, found in shared.items() if len(found) == 1}
    phrases: list[str] = []
    if "model" in one:
        phrases.append(one["model"] + (f" ({one['parameters']:,} parameters)" if "parameters" in one else ""))
    phrases += [one["precision"]] if "precision" in one else []
    phrases += [f"checkpointing {one['checkpointing']}"] if "checkpointing" in one else []
    phrases += [f"world size {one['world_size']}"] if "world_size" in one else []
    if "global_batch" in one and "seq_len" in one:
        tokens = one["global_batch"] * one["seq_len"]
        phrases.append(f"{one['global_batch']} × {one['seq_len']} = {tokens:,} tokens a step")
    phrases += [f"micro-batch {one['micro_batch']}"] if "micro_batch" in one else []
    phrases += [f"on {one['measured_on']}"] if "measured_on" in one else []
    phrases += [f"{one['launch']} launch"] if "launch" in one else []
    phrases += [value_text(name, one[name]) for name, usual in DEFAULTS.items() if one.get(name, usual) != usual]
    return phrases
