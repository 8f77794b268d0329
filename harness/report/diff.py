"""Two folders of results in the terminal: side by side with the ratio of each figure, or against a baseline."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.records.columns import COLUMN_TYPES, column
from harness.records.schema import Record, Row
from harness.report.columns import ShownColumn, write
from harness.report.comparison_columns import UNSETTLED_MARK, WORDS, abbreviations
from harness.report.folder_changes import Changes, Pair, changes, configuration_changes, environment, origin, pairs
from harness.report.regressions import BaselineCheck, Change, Figure
from harness.report.speeds import MINIMUM_RUNS, Speed, are_alike, speed_of
from harness.report.tables import fit_width, rich_table
from harness.report.text import (
    bytes_text,
    flop_unit,
    format_deviations,
    format_numbers,
    format_ratios,
    outcome_text,
    pluralize,
)
from harness.util.text import sanitize

EXACT = 0.01  # the relative tolerance of figures that a machine's load does not change

_EXACT_COLUMNS = ("_bytes", "_flops", "in_flight_micro_batches", "_retries", "_ooms")  # the ends of their names

# These have columns of their own; the last depends on what else a process imported.
_SHOWN = {"peak_allocated_bytes", "communication_bytes", "peak_rss_bytes"}

Rows = Sequence[tuple[Row, Row]]  # of A and of B

Speeds = Sequence[tuple[Speed | None, Speed | None]]  # of A and of B


def print_comparison(names: tuple[str, str], first: Sequence[Record], second: Sequence[Record], out: Console) -> None:
    """Print what differs between two folders, called A and B: versions and settings, pairs of runs, and other runs.

    Args:
        names: The names of A and of B.
        first: The records of A.
        second: The records of B.
        out: Where to print.
    """
    print_names(names, (first, second), out)
    configuration = configuration_changes(first, second)
    _print_changes("Versions", changes(map(origin, first), map(origin, second)), out)
    _print_changes("Environment", changes(map(environment, first), map(environment, second)), out)
    _print_changes("Configuration shared by all runs", configuration, out)
    _print_pairs(pairs(first, second, configuration), out)


def print_names(names: tuple[str, str], sides: tuple[Sequence[Record], Sequence[Record]], out: Console) -> None:
    """Print which runs are A and which are B."""
    for side, name, records in zip("AB", names, sides, strict=True):
        out.print(Text(sanitize(f"{side}: {name}, {pluralize(len(records), 'run')}")), soft_wrap=True)


def _print_changes(title: str, differences: Changes, out: Console) -> None:
    if not differences:
        out.print(Text(f"{title}: no difference"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for header in (title, "A", "B"):
        table.add_column(Text(header), overflow="fold")
    for key, values in differences.items():
        table.add_row(*(Text(sanitize(text)) for text in (key, *values)))
    out.print(table)


def _print_pairs(lines: Sequence[Pair], out: Console) -> None:
    matched = [(label, first, second) for label, first, second in lines if first and second]
    if matched:
        names, rows = [label for label, *_ in matched], [(first.row, second.row) for _, first, second in matched]
        speeds = [(speed_of(first.runs), speed_of(second.runs)) for _, first, second in matched]
        columns, left_out = fit_width(_columns(names, rows, speeds), out.width)
        out.print(rich_table(columns))
        titles = ", ".join(column.title for column in left_out)
        notes = [f"columns left out to fit {out.width} characters: {titles}"] if left_out else []
        legend = abbreviations(columns)
        notes += [legend] if legend else []
        notes += [*_legend(names, rows, speeds), *_notes(names, rows)]
    else:
        notes = ["no run of A has the same configuration as a run of B"]
    for side, name in (("A", "first"), ("B", "second")):
        unmatched = [(pair.label, getattr(pair, name)) for pair in lines if None in pair]
        texts = [f"{label} {_status(line.row)}" for label, line in unmatched if line]
        notes += [f"only in {side}: {', '.join(texts)}"] if texts else []
    for note in notes:
        out.print(Text(sanitize(note)))


# The figures of the table: column, word of its header, kind, and when A's column and that of the ratio are left out.
_FIGURES = (
    ("tokens_per_second", "tokens", "number", 7, 0),
    ("peak_allocated_bytes", "peak", "bytes", 5, 10),
    ("communication_bytes", "sent", "sent", 1, 9),
)


def _columns(names: Sequence[str], rows: Rows, by_side: Speeds) -> list[ShownColumn]:
    """Return the columns of both values and of B over A, without those that are empty throughout.

    Where width is short, A's value is left out before B's.
    """
    statuses = [(_status(first), _status(second)) for first, second in rows]
    changed = [before if before == after else f"{before} → {after}" for before, after in statuses]
    columns = [
        ShownColumn("run", [sanitize(name) for name in names], number=False),
        ShownColumn("status", changed, number=False),
    ]
    for key, word, kind, drop, drop_ratio in _FIGURES:
        title, values = WORDS[word].short, [row.get(key) for side in zip(*rows, strict=True) for row in side]
        (both,) = write([ShownColumn(f"{title} {{unit}}", values, kind)])
        ratios = format_ratios([_ratio(key, first, second) for first, second in rows])
        if kind == "number":
            marks = [UNSETTLED_MARK * _is_within_variation(*sides) for sides in by_side]
            ratios = [ratio + mark for ratio, mark in zip(ratios, marks, strict=True)]
        columns += [
            ShownColumn(f"{both.title}\nA", both.cells[: len(rows)], drop=drop),
            ShownColumn(f"{both.title}\nB", both.cells[len(rows) :], drop=drop + 1),
            ShownColumn(f"×\n{title}", ratios, drop=drop_ratio),
        ]
    for key, word, drop in (("loss_deviation", "loss", 3), ("grad_deviation", "gradient", 4)):
        columns.append(ShownColumn(f"{WORDS[word].on_one_line}\nA → B", _deviations(key, rows), drop=drop))
    return [column for column in columns if column.is_known]


def _ratio(key: str, first: Row, second: Row) -> float | None:
    """Return B over A, None unless both ended ok with a value and A's is not 0."""
    base, value = first.get(key), second.get(key)
    if not first["status"] == second["status"] == "ok" or not base or value is None:
        return None
    return float(value / base)


def _is_within_variation(first: Speed | None, second: Speed | None) -> bool:
    """Return whether two speeds that may be compared differ by no more than runs vary."""
    return bool(first and second and first.is_ranked and second.is_ranked and are_alike(first, second))


def _deviations(key: str, rows: Rows) -> list[str]:
    texts = [format_deviations([first.get(key), second.get(key)]) for first, second in rows]
    return [before if before == after else f"{before or '-'} → {after or '-'}" for before, after in texts]


def _status(row: Row) -> str:
    """Return the status, followed by how many repeats have it if not all do, as in "ok 2/3"."""
    runs, alike = row.get("runs", 1), row.get("runs_alike", 1)
    return str(row["status"]) if runs == alike else f"{row['status']} {alike}/{runs}"


def _legend(names: Sequence[str], rows: Rows, speeds: Speeds) -> Iterator[str]:
    """Yield the meanings of the table's marks, and the speeds that may not be compared."""
    yield "× is the ratio of B to A"
    if any(_is_within_variation(*sides) for sides in speeds):
        yield f"{UNSETTLED_MARK} marks a difference that is not certain"
    unranked = [
        name
        for name, (first, second), pair in zip(names, speeds, rows, strict=True)
        if first and second and not (first.is_ranked and second.is_ranked) and _ratio("tokens_per_second", *pair)
    ]
    if unranked:
        names_text = "every run" if len(unranked) == len(names) else ", ".join(unranked)
        yield f"fewer than {MINIMUM_RUNS} undisturbed runs, so that it is not certain which is faster: {names_text}"


def other_changes(first: Row, second: Row) -> list[str]:
    """Return the figures that no column shows and that differ by more than EXACT, in the form A → B."""
    texts = []
    for key in sorted((first.keys() & second.keys()) - _SHOWN):
        before, after = first[key], second[key]
        if key.endswith(_EXACT_COLUMNS) and None not in (before, after) and abs(after - before) > EXACT * abs(before):
            format_value = bytes_text if key.endswith("_bytes") else "{:,.0f}".format
            texts.append(f"{key} {format_value(before)} → {format_value(after)}")
    return texts


def _notes(names: Sequence[str], rows: Rows) -> Iterator[str]:
    """Yield other figures that changed, changes of the world size, reasons of failures, and noise warnings."""
    for name, (first, second) in zip(names, rows, strict=True):
        changed = other_changes(first, second) if first["status"] == second["status"] == "ok" else []
        if changed:
            yield f"{name}: {', '.join(changed)}"
        worlds = first.get("world_size"), second.get("world_size")
        if None not in worlds and worlds[0] != worlds[1]:
            yield f"{name} world size {worlds[0]} → {worlds[1]}"
        for side, row in (("A", first), ("B", second)):
            if first["status"] != second["status"] and row["status"] != "ok":
                yield f"{side}: {name} {outcome_text(row)}"
            if row.get("noise_warning"):
                yield f"{side}: {name} noise warning: {row['noise_warning']}"


def print_regressions(comparison: BaselineCheck, out: Console) -> None:
    """Print one line for each change, worst first, then what was compared, and whether the baseline is held."""
    for key, (before, after) in comparison.configuration.items():
        out.print(Text(sanitize(f"configuration of all runs: {key} {before} → {after}")), soft_wrap=True)
    if comparison.changes:
        columns, _ = fit_width(_change_columns(comparison), out.width)
        out.print(rich_table(columns))
    for note in _change_notes(comparison):
        out.print(Text(sanitize(note)), soft_wrap=True)


def _change_columns(comparison: BaselineCheck) -> list[ShownColumn]:
    limit = _percent(comparison.limit)
    cells = [
        (
            f"within {limit}" if change.verdict == "within limit" else change.verdict,
            sanitize(change.run),
            column(change.column).title if change.column in COLUMN_TYPES else change.column,
            _growth_text(change),
            _figure_text(change.column, change.before),
            _figure_text(change.column, change.after),
        )
        for change in comparison.changes
    ]
    headers = ("verdict", "run", "figure", "change", "A", "B")
    columns = zip(headers, zip(*cells, strict=True), strict=True)
    return [ShownColumn(header, texts, number=header == "change") for header, texts in columns]


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _figure_text(name: str, figure: Figure) -> str:
    value = figure.value
    if value is None or isinstance(value, str):
        return sanitize("unknown" if value is None else value)
    if figure.range:
        return f"{value:,.0f} [{figure.range[0]:,.0f}, {figure.range[1]:,.0f}], n = {figure.runs}"
    if name.endswith("_bytes"):
        return bytes_text(value)
    unit = flop_unit([value])
    return f"{format_numbers([value], unit)[0]} {unit.name}s"


def _growth_text(change: Change) -> str:
    """Return the change relative to the baseline in percent, with enough decimals to show a small one."""
    if math.isinf(change.growth):
        return ""
    share = -change.growth if change.after.range else change.growth
    decimals = 1 if abs(share) >= 0.0005 else 4
    return f"{100 * share:+.{decimals}f} %"


def _change_notes(comparison: BaselineCheck) -> Iterator[str]:
    """Yield what was compared and what was not, new configurations, and whether the baseline is held."""
    limit = _percent(comparison.limit)
    are_ok = f"{pluralize(comparison.compared, 'configuration')} that {'is' if comparison.compared == 1 else 'are'} ok"
    yield (
        f"compared {are_ok} in A: memory, bytes sent and FLOPs as exact figures,"
        f" and the speeds of {comparison.judged_speeds}"
    )
    for reason, labels in comparison.unjudged_speeds.items():
        names = "all" if len(labels) == comparison.compared else ", ".join(labels)
        yield f"speeds not judged for {names}: {reason}"
    if comparison.new:
        yield f"new in B and not judged: {', '.join(comparison.new)}"
    regressed = len({change.run for change in comparison.regressed})
    if regressed:
        yield f"REGRESSED: {regressed} of {pluralize(comparison.compared, 'configuration')} by more than {limit}"
    else:
        yield f"HOLDS: no configuration regressed by more than {limit}"


def regressions_json(comparison: BaselineCheck) -> str:
    """Return the comparison as JSON; a growth of null has no number, as where a run is missing."""
    changes = [
        dataclasses.asdict(change)
        | {"before": change.before._asdict(), "after": change.after._asdict()}
        | {"growth": None if math.isinf(change.growth) else change.growth}
        for change in comparison.changes
    ]
    values = dataclasses.asdict(comparison) | {"changes": changes, "holds": not comparison.regressed}
    return json.dumps(values, indent=2)
