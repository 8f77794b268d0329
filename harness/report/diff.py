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
from harness.report.speeds import MINIMUM_RUNS, are_alike
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
    matched = [pair for pair in lines if pair.first and pair.second]
    notes = ["no run of A has the same configuration as a run of B"]
    if matched:
        columns, left_out = fit_width(_columns(matched), out.width)
        out.print(rich_table(columns))
        titles = ", ".join(column.title for column in left_out)
        notes = [f"columns left out to fit {out.width} characters: {titles}"] if left_out else []
        notes += [text for text in (abbreviations(columns), *_legend(matched), *_notes(matched)) if text]
    for side, alone in (
        ("A", [(pair.label, pair.first) for pair in lines if not pair.second]),
        ("B", [(pair.label, pair.second) for pair in lines if not pair.first]),
    ):
        texts = [f"{label} {_status(line.row)}" for label, line in alone if line]
        notes += [f"only in {side}: {', '.join(texts)}"] if texts else []
    for note in notes:
        out.print(Text(sanitize(note)))


# The figures of the table: column, word of its header, kind, and when A's column and that of the ratio are left out.
_FIGURES = (
    ("tokens_per_second", "tokens", "number", 7, 0),
    ("peak_allocated_bytes", "peak", "bytes", 5, 10),
    ("communication_bytes", "sent", "sent", 1, 9),
)


def _columns(pairs: Sequence[Pair]) -> list[ShownColumn]:
    """Return the columns of both values and of B over A, without those that are empty throughout.

    Where width is short, A's value is left out before B's.
    """
    changed = [_change([_status(row) for row in pair.rows]) for pair in pairs]
    marks = [UNSETTLED_MARK if pair.speeds and are_alike(*pair.speeds) else "" for pair in pairs]
    columns = [
        ShownColumn("run", [sanitize(pair.label) for pair in pairs], number=False),
        ShownColumn("status", changed, number=False),
    ]
    for key, word, kind, drop, drop_ratio in _FIGURES:
        title, values = WORDS[word].short, [pair.rows[side].get(key) for side in (0, 1) for pair in pairs]
        (both,) = write([ShownColumn(f"{title} {{unit}}", values, kind)])
        ratios = format_ratios([pair.ratio(key) for pair in pairs])
        if kind == "number":
            ratios = [ratio + mark for ratio, mark in zip(ratios, marks, strict=True)]
        columns += [
            ShownColumn(f"{both.title}\nA", both.cells[: len(pairs)], drop=drop),
            ShownColumn(f"{both.title}\nB", both.cells[len(pairs) :], drop=drop + 1),
            ShownColumn(f"×\n{title}", ratios, drop=drop_ratio),
        ]
    for key, word, drop in (("loss_deviation", "loss", 3), ("grad_deviation", "gradient", 4)):
        cells = [_change(format_deviations([row.get(key) for row in pair.rows])) for pair in pairs]
        columns.append(ShownColumn(f"{WORDS[word].on_one_line}\nA → B", cells, drop=drop))
    return [column for column in columns if column.is_known]


def _change(texts: Sequence[str]) -> str:
    """Return two texts of A and of B, once where they are the same."""
    before, after = texts
    return before if before == after else f"{before or '-'} → {after or '-'}"


def _status(row: Row) -> str:
    """Return the status, followed by how many repeats have it if not all do, as in "ok 2/3"."""
    runs, alike = row.get("runs", 1), row.get("runs_alike", 1)
    return str(row["status"]) if runs == alike else f"{row['status']} {alike}/{runs}"


def _legend(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the meanings of the table's marks, and the speeds that may not be compared."""
    yield "× is the ratio of B to A"
    if any(pair.speeds and are_alike(*pair.speeds) for pair in pairs):
        yield f"{UNSETTLED_MARK} marks a difference that is not certain"
    unranked = [pair.label for pair in pairs if not pair.speeds and pair.ratio("tokens_per_second")]
    if unranked:
        names_text = "every run" if len(unranked) == len(pairs) else ", ".join(unranked)
        yield f"fewer than {MINIMUM_RUNS} undisturbed runs, so that it is not certain which is faster: {names_text}"


def _other_changes(first: Row, second: Row) -> Iterator[str]:
    """Yield the figures that no column shows and that differ by more than EXACT, in the form A → B."""
    for key in sorted((first.keys() & second.keys()) - _SHOWN):
        before, after = first[key], second[key]
        if key.endswith(_EXACT_COLUMNS) and None not in (before, after) and abs(after - before) > EXACT * abs(before):
            format_value = bytes_text if key.endswith("_bytes") else "{:,.0f}".format
            yield f"{key} {format_value(before)} → {format_value(after)}"


def _notes(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield other figures that changed, changes of the world size, reasons of failures, and noise warnings."""
    for pair in pairs:
        if pair.is_ok and (changed := ", ".join(_other_changes(*pair.rows))):
            yield f"{pair.label}: {changed}"
        before, after = (row.get("world_size") for row in pair.rows)
        if None not in (before, after) and before != after:
            yield f"{pair.label} world size {before} → {after}"
        for side, row, other in zip("AB", pair.rows, pair.rows[::-1], strict=True):
            if row["status"] not in ("ok", other["status"]):
                yield f"{side}: {pair.label} {outcome_text(row)}"
            if row.get("noise_warning"):
                yield f"{side}: {pair.label} noise warning: {row['noise_warning']}"


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
    values = dataclasses.asdict(comparison) | {"holds": not comparison.regressed}
    for change in values["changes"]:
        change["growth"] = None if math.isinf(change["growth"]) else change["growth"]
    return json.dumps(values, indent=2)
