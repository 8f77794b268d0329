"""Two folders of results side by side: what made them differently, and what each run cost in one over the other."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.config.fingerprint import result_affecting_keys
from harness.records.schema import Record, Row
from harness.report.frame import column_values, records_frame
from harness.report.labels import flattened
from harness.report.spread import is_unsettled, merge_repeats, spread
from harness.report.tables import Column, fit_width, rich_table
from harness.report.text import ONE, byte_unit, bytes_text, format_deviations, format_numbers, format_ratios
from harness.util.text import sanitize

_MARK = "~"

_NULL = "null"

# What a run is. All else may differ between two folders and leave runs to compare, if it does so for all of them.
_IS = ("model.", "strategy.", "checkpointing.")

# Where no configuration was recorded, these columns say what ran.
_SETTLED = (
    *("model", "strategy", "engine", "checkpointing", "precision", "world_size", "micro_batch", "global_batch"),
    *("seq_len", "zero_stage", "schedule", "virtual_stages", "data_parallel", "vocabulary_parallel"),
    *("checkpointing_every", "compile", "loss_chunks", "fused_optimizer", "offload", "offload_activations"),
    *("attention", "dropout"),
)

EXACT = 0.01  # relative; of figures that no machine's load changes

_EXACT = ("_bytes", "_flops", "in_flight", "_retries", "_errors")

_SHOWN = {"peak_allocated_bytes", "communication_bytes", "peak_host_bytes"}  # the last by what else a process imported

Flat = dict[str, Any]  # under dotted keys

Changes = dict[str, tuple[str, str]]  # by key, the values of A and of B

Rows = Sequence[tuple[Row, Row]]  # of A and of B


class Pair(NamedTuple):
    """What ran the same in both folders, a line of each; the side that a folder lacks is None."""

    first: Record | None
    second: Record | None


def print_comparison(names: tuple[str, str], first: Sequence[Record], second: Sequence[Record], out: Console) -> None:
    """Two folders, called A and B: what made their records differently, their runs in pairs, and those left alone."""
    for side, name, records in zip("AB", names, (first, second), strict=True):
        count = f"{len(records)} run{'s'[: len(records) > 1]}"
        out.print(Text(sanitize(f"{side}: {name}, {count}")), soft_wrap=True)
    configuration = configuration_changes(first, second)
    _print_changes("Versions", changes(map(_made_by, first), map(_made_by, second)), out)
    _print_changes("Environment", changes(map(_environment, first), map(_environment, second)), out)
    _print_changes("Configuration shared by all runs", configuration, out)
    _print_pairs(pairs(merge_repeats(first), merge_repeats(second), configuration), out)


def _made_by(record: Record) -> Flat:
    commit = record.commit or {}
    name = commit.get("commit") and f"{str(commit['commit'])[:12]}{' and changes' if commit.get('dirty') else ''}"
    return flattened(record.versions) | {"commit": name}


def _environment(record: Record) -> Flat:
    return flattened(record.environment)


def _configuration(record: Record) -> Flat:
    """Without what tells repeats apart. Null is a choice here, and not the same as no such key."""
    flat = flattened(result_affecting_keys(record.config))
    flat |= {"data.fingerprint": record.corpus} if record.corpus else {}
    return {key: _NULL if value is None else value for key, value in flat.items() if key != "repeat"}


def changes(first: Iterable[Flat], second: Iterable[Flat]) -> Changes:
    """The keys that have not the same values in both, with all of them; `-` where there is none."""
    found = _values(first), _values(second)
    keys = sorted({*found[0], *found[1]})
    return {
        key: (_joined(found[0].get(key)), _joined(found[1].get(key)))
        for key in keys
        if set(found[0].get(key, ())) != set(found[1].get(key, ()))
    }


def configuration_changes(first: Sequence[Record], second: Sequence[Record]) -> Changes:
    """As changes(), of keys that have one value in all rows of a folder, or are in none of them."""
    sides = [[_configuration(record) for record in records] for records in (first, second)]
    found = changes(*sides)
    return {key: values for key, values in found.items() if all(_is_shared(key, side) for side in sides)}


def _is_shared(key: str, side: Sequence[Flat]) -> bool:
    return len({_text(flat.get(key)) for flat in side}) <= 1


def _values(records: Iterable[Flat]) -> dict[str, list[str]]:
    """The different values of each key, in order. Unknown is no value."""
    found: dict[str, list[str]] = {}
    for flat in records:
        for key, value in flat.items():
            if value is not None and _text(value) not in found.setdefault(key, []):
                found[key].append(_text(value))
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _joined(values: Sequence[str] | None) -> str:
    return ", ".join(values) if values else "-"


def _print_changes(title: str, found: Changes, out: Console) -> None:
    if not found:
        out.print(Text(f"{title}: no difference"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for header in (title, "A", "B"):
        table.add_column(Text(header), overflow="fold")
    for key, values in found.items():
        table.add_row(*(Text(sanitize(text)) for text in (key, *values)))
    out.print(table)


def pairs(first: Sequence[Record], second: Sequence[Record], configuration: Changes) -> list[Pair]:
    """Lines that ran the same but for what changed for all of them, in order; then those alone.

    Where a folder has several such lines, as made by other versions, the latest of both are the pair.
    """
    sides: list[dict[str, list[Record]]] = [{}, {}]
    aside = {key for key, values in configuration.items() if not key.startswith(_IS) or "-" in values}
    for side, lines in zip(sides, (first, second), strict=True):
        for line in lines:
            side.setdefault(_what_ran(line, aside), []).append(line)
    together, alone = [], []
    for what in dict.fromkeys((*sides[0], *sides[1])):
        ones, others = sides[0].get(what, []), sides[1].get(what, [])
        together += [Pair(ones[-1], others[-1])] if ones and others else []
        kept = -1 if ones and others else None
        alone += [Pair(one, None) for one in ones[:kept]] + [Pair(None, other) for other in others[:kept]]
    return together + alone


def _what_ran(line: Record, aside: set[str]) -> str:
    """Equal for lines that ran the same. A key that one of the harness's versions did not have yet is as null."""
    flat = _configuration(line) or {key: line.row.get(key) for key in _SETTLED}
    told = {key: value for key, value in flat.items() if key not in aside and value not in (None, _NULL)}
    return json.dumps(told, sort_keys=True)


def _print_pairs(found: Sequence[Pair], out: Console) -> None:
    labels = column_values(
        records_frame([line for line in (first or second for first, second in found) if line]), "label"
    )
    together = [(label, one.row, two.row) for label, (one, two) in zip(labels, found, strict=True) if one and two]
    if together:
        names, rows = [label for label, *_ in together], [(first, second) for _, first, second in together]
        columns, left_out = fit_width(_columns(names, rows), out.width)
        out.print(rich_table(columns))
        titles = ", ".join(column.title for column in left_out)
        notes = [f"not shown in {out.width} columns: {titles}"] if left_out else []
        notes += [*_legend(names, rows), *_notes(names, rows)]
    else:
        notes = ["no run of A ran the same as one of B"]
    for side, position in (("A", 0), ("B", 1)):
        alone = [(label, pair[position]) for label, pair in zip(labels, found, strict=True) if None in pair]
        told = [f"{label} {_end(line.row)}" for label, line in alone if line]
        notes += [f"only in {side}: {', '.join(told)}"] if told else []
    for note in notes:
        out.print(Text(sanitize(note)))


def _columns(names: Sequence[str], rows: Rows) -> list[Column]:
    """Both values, and ratios of B to A; without the columns of which nothing is known."""
    ends = [(_end(first), _end(second)) for first, second in rows]
    marks = [_MARK if _is_unsettled(first, second) else "" for first, second in rows]
    speed, peak, sent = "tokens_per_second", "peak_allocated_bytes", "communication_bytes"
    speeds = format_ratios([_ratio(speed, first, second) for first, second in rows])
    columns = [
        Column(("run", ""), [sanitize(name) for name in names], number=False),
        Column(("status", ""), [one if one == other else f"{one} → {other}" for one, other in ends], number=False),
        *_both(speed, "tok/s", rows, drop=7),
        Column(("×", "tok/s"), [ratio + mark for ratio, mark in zip(speeds, marks, strict=True)]),
        *_both(peak, "peak", rows, drop=5),
        Column(("×", "peak"), format_ratios([_ratio(peak, first, second) for first, second in rows]), drop=10),
        *_both(sent, "comm.", rows, drop=1),
        Column(("×", "comm."), format_ratios([_ratio(sent, first, second) for first, second in rows]), drop=9),
        Column(("loss dev.", "A → B"), _deviations("loss_deviation", rows), drop=3),
        Column(("grad dev.", "A → B"), _deviations("grad_deviation", rows), drop=4),
    ]
    return [column for column in columns if any(column.cells)]


def _both(key: str, name: str, rows: Rows, drop: int) -> list[Column]:
    """A's and B's values in one unit; A's go first where width is short."""
    numbers = [row.get(key) for side in zip(*rows, strict=True) for row in side]
    unit = byte_unit(numbers) if key.endswith("_bytes") else ONE
    texts, header = format_numbers(numbers, unit), f"{name} {unit.name}".strip()
    return [
        Column((header, "A"), texts[: len(rows)], drop=drop),
        Column((header, "B"), texts[len(rows) :], drop=drop + 1),
    ]


def _ratio(key: str, first: Row, second: Row) -> float | None:
    """B over A; None unless both ended ok with a value and there is something to divide by."""
    base, value = first.get(key), second.get(key)
    if not first["status"] == second["status"] == "ok" or not base or value is None:
        return None
    return float(value / base)


def _is_unsettled(first: Row, second: Row) -> bool:
    return is_unsettled(_ratio("tokens_per_second", first, second), spread(second), spread(first))


def _deviations(key: str, rows: Rows) -> list[str]:
    texts = [format_deviations([first.get(key), second.get(key)]) for first, second in rows]
    return [one if one == other else f"{one or '-'} → {other or '-'}" for one, other in texts]


def _end(row: Row) -> str:
    """ok, or of repeats that did not all end so: ok 2/3."""
    runs, alike = row.get("runs", 1), row.get("runs_alike", 1)
    return str(row["status"]) if runs == alike else f"{row['status']} {alike}/{runs}"


def _legend(names: Sequence[str], rows: Rows) -> Iterator[str]:
    ratios = [_ratio("tokens_per_second", first, second) for first, second in rows]
    yield "× is B over A"
    if any(_is_unsettled(first, second) for first, second in rows):
        yield f"{_MARK} the spreads of A and B meet (between runs; of one run that of its steps)"
    unknown = [
        name
        for name, ratio, (first, second) in zip(names, ratios, rows, strict=True)
        if ratio is not None and spread(first) is None and spread(second) is None
    ]
    if unknown:
        yield f"no spread is known, so whether they differ is not settled either: {', '.join(unknown)}"


def other_changes(first: Row, second: Row) -> list[str]:
    """Figures of what ran that no column shows, as A → B where they differ by more than EXACT."""
    found = []
    for key in sorted((first.keys() & second.keys()) - _SHOWN):
        one, other = first[key], second[key]
        if key.endswith(_EXACT) and None not in (one, other) and abs(other - one) > EXACT * abs(one):
            text = bytes_text if key.endswith("_bytes") else "{:,.0f}".format
            found.append(f"{key} {text(one)} → {text(other)}")
    return found


def _notes(names: Sequence[str], rows: Rows) -> Iterator[str]:
    """Why statuses changed, worlds that did, what else changed, and what disturbed the runs."""
    for name, (first, second) in zip(names, rows, strict=True):
        changed = other_changes(first, second) if first["status"] == second["status"] == "ok" else []
        if changed:
            yield f"{name}: {', '.join(changed)}"
        worlds = first.get("world_size"), second.get("world_size")
        if None not in worlds and worlds[0] != worlds[1]:
            yield f"{name} world size {worlds[0]} → {worlds[1]}"
        for side, row in (("A", first), ("B", second)):
            if first["status"] != second["status"] and row["status"] != "ok":
                yield f"{side}: {name} {row['status']}: {row.get('reason') or 'no reason recorded'}"
            if row.get("disturbed"):
                yield f"{side}: {name} disturbed, {row['disturbed']}"
