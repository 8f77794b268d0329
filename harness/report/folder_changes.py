"""The differences between two folders of results, and the pairs of runs with the same configuration."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from harness.config.fingerprint import result_affecting_keys
from harness.records.schema import Record
from harness.report.frame import column_values, records_frame
from harness.report.labels import flattened
from harness.report.view import merge_repeats

# A run is defined by these parts of its configuration. All others may differ between two folders and leave runs to
# compare, if they differ for all of them.
_DEFINING = ("model.", "strategy.", "checkpointing.")

# These columns identify a run whose configuration was not recorded.
_DEFINING_COLUMNS = (
    *("model", "strategy", "engine", "checkpointing", "precision", "world_size", "micro_batch", "global_batch"),
    *("seq_len", "zero_stage", "schedule", "virtual_stages", "data_parallel", "vocabulary_parallel"),
    *("checkpointing_every", "compile", "loss_chunks", "fused_optimizer", "offload", "offload_activations"),
    *("attention", "dropout", "saved_products"),
)

_NULL = "null"

Flat = dict[str, Any]  # under dotted keys

Changes = dict[str, tuple[str, str]]  # by key, the values of A and of B


class Pair(NamedTuple):
    """The lines of both folders with the same configuration; a folder without such a line has None."""

    label: str  # unique among the pairs
    first: Record | None
    second: Record | None


def origin(record: Record) -> Flat:
    """Return the versions and the commit that a record was made with."""
    commit = record.commit
    name = f"{commit['commit'][:12]}{' and changes' if commit.get('dirty') else ''}" if commit else None
    return flattened(record.versions) | {"commit": name}


def environment(record: Record) -> Flat:
    """Return the environment of a record."""
    return flattened(record.environment)


def is_table(lines: Sequence[Record]) -> bool:
    """Return whether these are the rows of a runs.csv, which have no configurations."""
    return bool(lines) and not any(line.config for line in lines)


def _configuration(record: Record) -> Flat:
    """Return the configuration without the repeat index. Null is a value, and not the same as a missing key."""
    flat = flattened(result_affecting_keys(record.config))
    flat |= {"data.fingerprint": record.corpus} if record.corpus else {}
    return {key: _NULL if value is None else value for key, value in flat.items() if key != "repeat"}


def changes(first: Iterable[Flat], second: Iterable[Flat]) -> Changes:
    """Return the keys whose values differ between the two, with all values of both sides; `-` means none."""
    values = _values(first), _values(second)
    keys = sorted({*values[0], *values[1]})
    return {
        key: (_join(values[0].get(key)), _join(values[1].get(key)))
        for key in keys
        if set(values[0].get(key, ())) != set(values[1].get(key, ()))
    }


def configuration_changes(first: Sequence[Record], second: Sequence[Record]) -> Changes:
    """Return the changes of keys that have one value in all rows of a folder, or are in none of them.

    A table of runs has no configurations, so that nothing is known to have changed.
    """
    if any(map(is_table, (first, second))):
        return {}
    sides = [[_configuration(record) for record in records] for records in (first, second)]

    def is_shared(key: str) -> bool:
        return all(len({_text(flat.get(key)) for flat in side}) <= 1 for side in sides)

    return {key: values for key, values in changes(*sides).items() if is_shared(key)}


def _values(records: Iterable[Flat]) -> dict[str, list[str]]:
    """Return the distinct known values of each key, in order."""
    values: dict[str, list[str]] = {}
    for flat in records:
        for key, value in flat.items():
            if value is not None and _text(value) not in values.setdefault(key, []):
                values[key].append(_text(value))
    return values


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _join(values: Sequence[str] | None) -> str:
    return ", ".join(values) if values else "-"


def pairs(first: Sequence[Record], second: Sequence[Record], configuration: Changes) -> list[Pair]:
    """Return the pairs of lines with the same configuration, followed by the lines without a pair; repeats are a line.

    Configuration keys that changed for all runs are ignored. A table of runs has no configurations: if either side is
    one, the runs are compared by the columns that both sides know.

    If a folder has several such lines, those of the same run are a pair; of others, for instance made by different
    versions, the latest of both.
    """
    first, second = merge_repeats(first), merge_repeats(second)
    sides: list[dict[str, list[Record]]] = [{}, {}]
    ignored = {key for key, values in configuration.items() if not key.startswith(_DEFINING) or "-" in values}
    columns = _known_columns(first, second) if any(map(is_table, (first, second))) else None
    for side, of_side in zip(sides, (first, second), strict=True):
        for line in of_side:
            side.setdefault(_run_key(line, ignored, columns), []).append(line)
    matched: list[tuple[Record | None, Record | None]] = []
    unmatched: list[tuple[Record | None, Record | None]] = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        first_lines, second_lines = sides[0].get(key, []), sides[1].get(key, [])
        matched += _same_runs(first_lines, second_lines)
        if first_lines and second_lines:
            matched.append((first_lines.pop(), second_lines.pop()))
        unmatched += [(line, None) for line in first_lines] + [(None, line) for line in second_lines]
    lines = [first or second for first, second in matched + unmatched]
    labels = column_values(records_frame([line for line in lines if line]), "label")
    return [Pair(label, *pair) for label, pair in zip(labels, matched + unmatched, strict=True)]


def _known_columns(*sides: Sequence[Record]) -> list[str]:
    """Return the defining columns that every side has a value of: an older version may not have had a column."""
    return [
        name
        for name in _DEFINING_COLUMNS
        if all(any(line.row.get(name) is not None for line in lines) for lines in sides)
    ]


def _same_runs(first_lines: list[Record], second_lines: list[Record]) -> list[tuple[Record, Record]]:
    """Remove the lines of the same run from both lists, and return them as pairs; an id has the hash of its run."""
    by_id = {line.run_id: line for line in second_lines}
    matched = [(line, by_id[line.run_id]) for line in first_lines if line.run_id in by_id]
    for first, second in matched:
        first_lines.remove(first)
        second_lines.remove(second)
    return matched


def _run_key(line: Record, ignored: set[str], columns: Sequence[str] | None) -> str:
    """Return a key that is equal for lines with the same configuration, or with the same values in `columns`.

    A key that an older version of the harness did not have counts as null.
    """
    flat = _configuration(line) if columns is None else {}
    flat = flat or {key: line.row.get(key) for key in columns or _DEFINING_COLUMNS}
    defining = {key: value for key, value in flat.items() if key not in ignored and value not in (None, _NULL)}
    return json.dumps(defining, sort_keys=True)
