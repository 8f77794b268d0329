"""The differences between two folders of results: pairs of runs with the same configuration, and what became worse.

Bytes of state, bytes sent and operations are the same in every run of a program, so that any growth of theirs is real.
A peak on a CPU also has the buffers of gloo's threads, as many as exist at once: it has grown only if it has in every
repeat. A speed has changed only if it has left the range of its repeats.
"""

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from harness.config.fingerprint import result_affecting_keys
from harness.config.from_dict import flattened
from harness.records.provenance import machine_text, versions_text
from harness.records.schema import COLUMNS, Record, Row
from harness.report.comparability import group_by
from harness.report.labels import DEFAULTS
from harness.report.lines import labels_of
from harness.report.speeds import Speed, are_alike, speed_of
from harness.report.text import sentence
from harness.report.view import merge_repeats
from harness.util.files import JsonObject

# These columns identify a run whose configuration was not recorded: all that a configuration and its layout determine.
DEFINING_COLUMNS = (
    *(name for name, column in COLUMNS.items() if column.group in ("model", "layout", "batch", "options")),
    "launch",
)

_NULL = "null"

MISSING = Record({"status": "missing"})  # stands for the line that a folder does not have

Flat = dict[str, Any]  # under dotted keys

Changes = dict[str, tuple[str, str]]  # by key, the values of A and of B; `-` means none


@dataclass(frozen=True)
class Pair:
    """The lines of both folders with the same configuration, of which one may be MISSING."""

    label: str  # unique among the pairs
    first: Record
    second: Record

    @property
    def rows(self) -> tuple[Row, Row]:
        """The rows of both lines."""
        return self.first.row, self.second.row

    @property
    def is_ok(self) -> bool:
        """Whether both lines ended ok."""
        return self.first.status == self.second.status == "ok"

    @cached_property
    def speeds(self) -> tuple[Speed, Speed] | None:
        """The speeds of both lines, if they may be ranked."""
        first, second = speed_of(self.first.runs), speed_of(self.second.runs)
        return (first, second) if first.is_ranked and second.is_ranked else None

    @property
    def is_unsettled(self) -> bool:
        """Whether both speeds may be ranked and neither is certainly higher."""
        return self.speeds is not None and are_alike(*self.speeds)

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


def _configuration(record: Record) -> Flat:
    """Return the configuration without the repeat index. Null is a value, and not the same as a missing key."""
    flat = flattened(result_affecting_keys(record.config))
    flat |= {"data.fingerprint": record.corpus} if record.corpus else {}
    return {key: _text(value) for key, value in flat.items() if key != "repeat"}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def changes(first: Sequence[Flat], second: Sequence[Flat]) -> Changes:
    """Return the keys whose values differ between the two, with all known values of both sides."""
    differing: Changes = {}
    for key in dict.fromkeys(key for flat in (*first, *second) for key in flat):
        before, after = (
            dict.fromkeys(_text(flat[key]) for flat in side if flat.get(key) is not None) for side in (first, second)
        )
        if before.keys() != after.keys():
            differing[key] = (", ".join(before) or "-", ", ".join(after) or "-")
    return differing


def configuration_changes(first: Sequence[Record], second: Sequence[Record]) -> Changes:
    """Return the changes of keys that have one value in all rows of a folder, or are in none of them.

    A table of runs has no configurations, so that nothing is known to have changed.
    """
    if _has_table(first, second):
        return {}
    sides = [[_configuration(record) for record in records] for records in (first, second)]
    differing = changes(*sides)
    return {key: differing[key] for key in sorted(differing) if all(_is_shared(key, side) for side in sides)}


def _has_table(*sides: Sequence[Record]) -> bool:
    """Return whether any side are the rows of a runs.csv, which have no configurations."""
    return any(not any(record.config for record in records) for records in sides)


def _is_shared(key: str, side: Sequence[Flat]) -> bool:
    return len({flat.get(key, _NULL) for flat in side}) == 1


def pairs(first: Sequence[Record], second: Sequence[Record], ignored: Collection[str]) -> list[Pair]:
    """Return the pairs of lines with the same configuration, followed by the lines without a pair; repeats are a line.

    A table of runs has no configurations: if either side is one, the runs are compared by the columns that both sides
    know. If a folder has several lines of a configuration, those of the same run are a pair; of others, for instance
    made by different versions, the latest of both.

    Args:
        first: The records of A.
        second: The records of B.
        ignored: Keys of configurations that may differ.
    """
    sides = merge_repeats(first), merge_repeats(second)
    columns = _known_columns(*sides) if _has_table(*sides) else []
    groups = [group_by(lines, lambda line: _run_key(line, ignored, columns)) for lines in sides]
    couples: list[tuple[Record, Record]] = []
    for key in dict.fromkeys((*groups[0], *groups[1])):
        befores, afters = ({line.run_id: line for line in group.get(key, [])} for group in groups)
        couples += [(befores.pop(run_id), afters.pop(run_id)) for run_id in list(befores) if run_id in afters]
        if befores and afters:
            couples.append((befores.popitem()[1], afters.popitem()[1]))
        couples += [(line, MISSING) for line in befores.values()] + [(MISSING, line) for line in afters.values()]
    couples.sort(key=lambda couple: MISSING in couple)
    labels, _ = labels_of([second if first is MISSING else first for first, second in couples])
    return [Pair(label, *couple) for label, couple in zip(labels, couples, strict=True)]


def _known_columns(*sides: Sequence[Record]) -> list[str]:
    """Return the defining columns of which every side has values: an older version may not have had a column.

    One with a default came with its option, which all rows before it left out.
    """
    return [
        name
        for name in DEFINING_COLUMNS
        if name in DEFAULTS or all(any(line.row.get(name) is not None for line in lines) for lines in sides)
    ]


def _run_key(line: Record, ignored: Collection[str], columns: Sequence[str]) -> frozenset[tuple[str, str]]:
    """Return a key that is equal for lines with the same configuration, or with the same values in `columns`.

    A key that an older version of the harness did not have counts as null.
    """
    flat = {} if columns else _configuration(line)
    if not flat:
        values = DEFAULTS | {name: value for name, value in line.row.items() if value is not None}
        flat = {name: _text(values.get(name)) for name in columns or DEFINING_COLUMNS}
    return frozenset((key, text) for key, text in flat.items() if key not in ignored and text != _NULL)


# The columns that may not grow.
EXACT_COLUMNS = (
    *("peak_allocated_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"),
    *("communication_bytes", "executed_flops"),
)

SPEED = "tokens_per_second"  # the column that may not fall

Verdict = Literal["regressed", "within limit", "improved"]


@dataclass(frozen=True)
class Figure:
    """One side of a change: a number, or the status of the runs in words; speeds have the range of their repeats."""

    value: float | str | None  # None is no longer known
    range: tuple[float, float] | None = None
    runs: int | None = None


@dataclass(frozen=True)
class Change:
    """A figure of one configuration that differs from the baseline's.

    `growth` is relative, and positive if the figure became worse: more memory, or a lower speed. It is infinite where a
    run is missing or fails, or where a figure is no longer known.
    """

    run: str
    column: str
    before: Figure
    after: Figure
    growth: float
    verdict: Verdict


def compare(
    baseline: Sequence[Record], current: Sequence[Record], limit: float, across_versions: bool = False
) -> JsonObject:
    """Return what changed from the baseline, as `--json` has it.

    Args:
        baseline: The records, or the rows of a runs.csv, that must be held.
        current: Those that are compared with it.
        limit: The growth that is tolerated, relative.
        across_versions: Whether speeds are compared although versions differ, as in a test of an upgrade.
    """
    configuration = configuration_changes(baseline, current)
    other_keys = [key for key, values in configuration.items() if "-" in values]  # that only some versions have
    lines = pairs(baseline, current, other_keys)
    compared = [pair for pair in lines if pair.first.status == "ok"]
    reasons = {pair.label: _why_unjudged(pair, across_versions) for pair in compared if pair.is_ok}
    differences = [
        Change(pair.label, column, before, after, growth, _verdict(growth, limit))
        for pair in compared
        for column, before, after, growth in _differences(pair)
        if column != SPEED or (not reasons[pair.label] and abs(growth) > limit)
    ]
    labels = group_by(reasons, reasons.__getitem__)
    return {
        "limit": limit,
        "compared": len(compared),  # configurations that the baseline has as ok
        "changes": sorted(differences, key=lambda change: -change.growth),  # worst first
        "judged_speeds": len(labels.pop("", [])),
        "unjudged_speeds": labels,  # of the configurations, by the reason
        "configuration": {key: values for key, values in configuration.items() if key not in other_keys},
        "new": [pair.label for pair in lines if pair.first is MISSING],
        "holds": all(change.verdict != "regressed" for change in differences),
    }


def _why_unjudged(pair: Pair, across_versions: bool) -> str:
    """Return why the speeds of two lines that ended ok cannot be compared; empty if they can."""
    first, second = pair.first, pair.second
    devices = str(first.row.get("measured_on")), str(second.row.get("measured_on"))
    origins = {"device": devices, "machine": (machine_text(first), machine_text(second))}
    origins |= {} if across_versions else {"versions": (versions_text(first), versions_text(second))}
    for part, (before, after) in origins.items():
        if before is None or after is None:
            return sentence("unknown_origin", part=part, before=before, after=after)
        if before != after and part == "versions":
            versions = ([dict(entry.rsplit(" ", 1) for entry in text.split(", "))] for text in (before, after))
            return sentence("other_versions", changes=changes(*versions))
        if before != after:
            return sentence("other_origin", part=part, before=before, after=after)
    return "" if pair.speeds else sentence("too_few_runs")


def _differences(pair: Pair) -> Iterator[tuple[str, Figure, Figure, float]]:
    """Yield the columns that differ, with both figures and the growth: of the status, exact figures and the speed."""
    if _ok_share(pair.second) < _ok_share(pair.first):
        yield "status", Figure("ok"), Figure(sentence("less_ok", row=pair.second.row)), math.inf
    for column in EXACT_COLUMNS if pair.is_ok else ():
        least, most = _range(pair.first, column, unknown=math.nan)  # which nothing exceeds
        new_least, new_most = _range(pair.second, column, unknown=math.inf)
        if new_least > most:
            grown = Figure(new_least if math.isfinite(new_least) else None)
            yield column, Figure(most), grown, (new_least - most) / most if most else math.inf
        if new_most < least:
            yield column, Figure(least), Figure(new_most), (new_most - least) / least
    if pair.speeds and not pair.is_unsettled:
        before, after = (Figure(speed.median, (speed.low, speed.high), speed.runs) for speed in pair.speeds)
        yield SPEED, before, after, 1 - pair.speeds[1].median / pair.speeds[0].median


def _ok_share(line: Record) -> float:
    """Return the share of repeats that ended ok."""
    return float(line.row["runs_alike"] / line.row["runs"]) if line.status == "ok" else 0.0


def _range(line: Record, column: str, unknown: float) -> tuple[float, float]:
    """Return the least and the largest value of a column in the runs that ended ok, `unknown` if none has one."""
    values = [run.row[column] for run in line.runs if run.status == "ok" and run.row.get(column) is not None]
    return min(values, default=unknown), max(values, default=unknown)


def _verdict(growth: float, limit: float) -> Verdict:
    if growth < 0:
        return "improved"
    return "within limit" if growth <= limit or math.isclose(growth, limit) else "regressed"
