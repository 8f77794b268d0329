"""The differences between two folders of results, and the pairs of runs with the same configuration."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.config.fingerprint import result_affecting_keys
from harness.records.schema import Record, Row
from harness.report.comparability import group_by
from harness.report.labels import flattened
from harness.report.lines import labels_of
from harness.report.speeds import Speed, speed_of
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


@dataclass(frozen=True)
class Pair:
    """The lines of both folders with the same configuration; a folder without such a line has None."""

    label: str  # unique among the pairs
    first: Record | None
    second: Record | None

    @cached_property
    def rows(self) -> tuple[Row, Row]:
        """The rows of both lines, empty for a line that a folder does not have."""
        return self.first.row if self.first else {}, self.second.row if self.second else {}

    @cached_property
    def is_ok(self) -> bool:
        """Whether both lines ended ok."""
        return all(row.get("status") == "ok" for row in self.rows)

    @cached_property
    def speeds(self) -> tuple[Speed, Speed] | None:
        """The speeds of both lines, if they may be ranked."""
        first, second = (speed_of(line.runs if line else ()) for line in (self.first, self.second))
        return (first, second) if first.is_ranked and second.is_ranked else None

    def ratio(self, key: str) -> float | None:
        """Return B over A, None unless both ended ok with a value and A's is not 0."""
        base, value = (row.get(key) for row in self.rows)
        return float(value / base) if self.is_ok and base and value is not None else None


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
    sides = _values(first), _values(second)
    texts = {key: tuple(side.get(key, {}) for side in sides) for key in sorted({*sides[0], *sides[1]})}
    return {
        key: (", ".join(before) or "-", ", ".join(after) or "-")
        for key, (before, after) in texts.items()
        if before.keys() != after.keys()
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


def _values(records: Iterable[Flat]) -> dict[str, dict[str, None]]:
    """Return the distinct known values of each key, in order."""
    values: dict[str, dict[str, None]] = {}
    for flat in records:
        for key, value in flat.items():
            if value is not None:
                values.setdefault(key, {})[_text(value)] = None
    return values


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def pairs(first: Sequence[Record], second: Sequence[Record], configuration: Changes) -> list[Pair]:
    """Return the pairs of lines with the same configuration, followed by the lines without a pair; repeats are a line.

    Configuration keys that changed for all runs are ignored. A table of runs has no configurations: if either side is
    one, the runs are compared by the columns that both sides know.

    If a folder has several such lines, those of the same run are a pair; of others, for instance made by different
    versions, the latest of both.
    """
    sides = merge_repeats(first), merge_repeats(second)
    ignored = {key for key, values in configuration.items() if not key.startswith(_DEFINING) or "-" in values}
    columns = _known_columns(*sides) if any(map(is_table, sides)) else None
    groups = [group_by(lines, lambda line: _run_key(line, ignored, columns)) for lines in sides]
    matched: list[tuple[Record | None, Record | None]] = []
    unmatched: list[tuple[Record | None, Record | None]] = []
    for key in dict.fromkeys((*groups[0], *groups[1])):
        befores, afters = (group.get(key, []) for group in groups)
        by_id = {line.run_id: line for line in afters}
        same = [(line, by_id[line.run_id]) for line in befores if line.run_id in by_id]
        ids = {line.run_id for line, _ in same}
        befores, afters = ([line for line in lines if line.run_id not in ids] for lines in (befores, afters))
        matched += [*same, *zip(befores[-1:], afters[-1:], strict=False)]
        count = min(len(befores), len(afters), 1)
        unmatched += [(line, None) for line in befores[: len(befores) - count]]
        unmatched += [(None, line) for line in afters[: len(afters) - count]]
    lines = [first or second for first, second in matched + unmatched]
    labels, _ = labels_of([line for line in lines if line])
    return [Pair(label, *pair) for label, pair in zip(labels, matched + unmatched, strict=True)]


def _known_columns(*sides: Sequence[Record]) -> list[str]:
    """Return the defining columns that every side has a value of: an older version may not have had a column."""
    return [
        name
        for name in _DEFINING_COLUMNS
        if all(any(line.row.get(name) is not None for line in lines) for lines in sides)
    ]


def _run_key(line: Record, ignored: set[str], columns: Sequence[str] | None) -> str:
    """Return a key that is equal for lines with the same configuration, or with the same values in `columns`.

    A key that an older version of the harness did not have counts as null.
    """
    flat = _configuration(line) if columns is None else {}
    flat = flat or {key: line.row.get(key) for key in columns or _DEFINING_COLUMNS}
    defining = {key: value for key, value in flat.items() if key not in ignored and value not in (None, _NULL)}
    return json.dumps(defining, sort_keys=True)
