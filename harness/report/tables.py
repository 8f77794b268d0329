"""The comparison as a table: one list of columns for the terminal and the page."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.records.schema import Record, Row
from harness.report.frame import (
    MEMORY_COLUMNS,
    baseline_names,
    column_values,
    distinct_values,
    labels_by_kernel,
    labels_by_staleness,
    shared_settings,
    varying_columns,
)
from harness.report.labels import VARYING, cell_text
from harness.report.text import (
    MILLISECONDS,
    ONE,
    Unit,
    byte_unit,
    format_deviations,
    format_fractions,
    format_numbers,
    format_percents,
    format_ratios,
)
from harness.report.view import MOST, View, truncate
from harness.util.text import sanitize

PIPED_WIDTH = 120

_GAP = 2

_LONGEST_TEXT = 20

_SHORTER_TEXT, _SHORTEST_TEXT = 12, 8

_SHORT = {"selective": "sel", "attention": "attn"}

_DROP_NAMES = 100  # names that vary go after every number that may

_STALE_MARK, _DISTURBED_MARK, _UNSETTLED_MARK = "†", "‡", "~"

_COLOURS = {"ok": "green", "refused": "yellow", "interrupted": "yellow", "oom": "red", "timeout": "red", "error": "red"}


@dataclass(frozen=True)
class Column:
    """A column ready to show: `header` in two lines (name, unit), a text per row."""

    header: tuple[str, str]
    cells: list[str]
    number: bool = True
    drop: int = 0  # where width is short, 1 goes first; 0 stays
    key: str = ""  # the column of runs.csv, where it is one

    @property
    def title(self) -> str:
        """The header on one line."""
        return " ".join(part for part in self.header if part)


def comparison_columns(table: pd.DataFrame, short: bool) -> list[Column]:
    """The columns of the main table; those without a single value are left out, but for the names and the status.

    short: checkpointing abbreviated, for the terminal.
    """
    memory = byte_unit([v for name in (*MEMORY_COLUMNS, "state_bytes") for v in column_values(table, name)])
    communication = byte_unit(column_values(table, "communication_bytes"))
    compared = bool(baseline_names(table))

    def number(key: str, header: tuple[str, str], unit: Unit, drop: int) -> Column:
        return Column(header, format_numbers(column_values(table, key), unit), drop=drop, key=key)

    def ratio(key: str, name: str, drop: int) -> Column:
        return Column(
            ("×", name),
            format_ratios(column_values(table, f"{key}_ratio")) if compared else [""] * len(table),
            drop=drop,
        )

    speed_ratio = ratio("tokens_per_second", "tok/s", 11)
    marks = [_UNSETTLED_MARK if unsettled else "" for unsettled in column_values(table, "unsettled")]
    numbers = [
        number("tokens_per_second", ("", "tok/s"), ONE, 0),
        Column(("±", "%"), format_percents(column_values(table, "between_runs")), drop=10),
        Column(("", "runs"), _runs(table), drop=7),
        number("tokens_per_second_per_device", ("tok/s", "/device"), ONE, 2),
        replace(speed_ratio, cells=[cell and cell + mark for cell, mark in zip(speed_ratio.cells, marks, strict=True)]),
        Column(("MFU", "%"), format_percents(column_values(table, "mfu")), drop=9, key="mfu"),
        number("step_seconds", ("step", "ms"), MILLISECONDS, 8),
        Column(("", "bubble"), format_fractions(column_values(table, "bubble")), drop=15),
        Column(("bubble", "formula"), format_fractions(column_values(table, "bubble_formula")), drop=1),
        number("peak_allocated_bytes", ("peak", memory.name), memory, 0),
        ratio("peak_allocated_bytes", "peak", 13),
        number("state_bytes", ("state", memory.name), memory, 4),
        number("activation_bytes", ("activ.", memory.name), memory, 3),
        number("communication_bytes", ("comm.", communication.name), communication, 12),
        ratio("communication_bytes", "comm.", 14),
        Column(("loss", "dev."), format_deviations(column_values(table, "loss_deviation")), drop=5),
        Column(("grad", "dev."), format_deviations(column_values(table, "grad_deviation")), drop=6),
    ]
    return _names(table, short) + [column for column in numbers if any(column.cells)]


def _names(table: pd.DataFrame, short: bool) -> list[Column]:
    """What tells the rows apart, and how each ended."""
    columns = [Column(("strategy", ""), _texts(column_values(table, "strategy")), number=False)]
    if len(distinct_values(table, "checkpointing")) > 1:
        kinds = [str(value or "") for value in column_values(table, "checkpointing")]
        cells = [sanitize(_SHORT.get(kind, kind) if short else kind) for kind in kinds]
        columns.append(Column(("ckpt" if short else "checkpointing", ""), cells, number=False))
    varying = [
        Column((VARYING[name], ""), _texts(column_values(table, name)), number=False, drop=_DROP_NAMES + position)
        for position, name in enumerate(reversed(varying_columns(table)))
    ]
    return [*columns, *reversed(varying), Column(("status", ""), _statuses(table), number=False)]


def _statuses(table: pd.DataFrame) -> list[str]:
    """How each line ended, how many of its runs did so where not all, and marks for what a note below says of it."""
    parts = (column_values(table, name) for name in ("status", "runs", "runs_alike", "stale", "disturbed"))
    return [
        status
        + (f" {alike}/{runs}" if alike != runs else "")
        + (f" {_STALE_MARK}" if stale else "")
        + (f" {_DISTURBED_MARK}" if disturbed else "")
        for status, runs, alike, stale, disturbed in zip(*parts, strict=True)
    ]


def _runs(table: pd.DataFrame) -> list[str]:
    """How many runs each line stands for, where any stands for several."""
    runs = column_values(table, "runs")
    return [str(count) for count in runs] if any(count and count > 1 for count in runs) else [""] * len(runs)


def _texts(cells: Sequence[object]) -> list[str]:
    return ["" if cell is None else sanitize(cell_text(cell)) for cell in cells]


def print_table(view: View, console: Console, only: Collection[str] | None = None) -> None:
    """The comparison in the terminal, within the console's width: repeated runs a line, failures' reasons underneath.

    only: the run ids whose lines to show, the others serving as baseline. Prints a line saying so if there is nothing
    to show.
    """
    whole, view = view, view if only is not None else truncate(view, MOST)
    lines, table = view.lines, view.line_medians
    if only is not None:
        wanted = [any(run.run_id in only for run in line.runs) for line in lines]
        table = table[wanted].reset_index(drop=True)  # ratios stay to the rows they were measured against
        lines = [line for line, is_wanted in zip(lines, wanted, strict=True) if is_wanted]
    if table.empty:
        console.print(Text("no runs recorded"))
        return
    console.print(Text("; ".join(_texts(shared_settings(table)) + _caption(table))))
    columns, left_out = fit_width(comparison_columns(table, short=True), console.width)
    console.print(rich_table(columns), soft_wrap=False)
    width = console.width
    if left_out:
        names = ", ".join(column.title for column in left_out)
        console.print(Text(f"not shown in {width} columns: {names}", style="dim"))
    if len(view.records) < len(whole.records):
        console.print(Text(f"{len(view.records)} of {len(whole.records)} runs are shown; runs.csv has all"))
    for note in (*_legend(columns), *_notes(table, lines)):
        console.print(Text(note))


def _caption(table: pd.DataFrame) -> list[str]:
    names = baseline_names(table)
    return [f"× is of {sanitize(names)}"] if names else []


def _legend(columns: Sequence[Column]) -> list[str]:
    """What the marks of the columns shown mean."""
    told = {
        "± half the range of tok/s between runs over their median": any(column.header[0] == "±" for column in columns),
        f"{_UNSETTLED_MARK} not settled: the spreads meet (±; of one run that of its steps)": any(
            cell.endswith(_UNSETTLED_MARK) for column in columns if column.number for cell in column.cells
        ),
    }
    return [line for line, holds in told.items() if holds]


def _notes(table: pd.DataFrame, lines: Sequence[Record]) -> list[str]:
    """A line for each failure, saying why, and for each reason to call rows stale or disturbed."""
    labelled = list(zip(column_values(table, "label"), (line.runs for line in lines), strict=True))
    notes: list[str] = []
    for label, runs in labelled:
        failures = _said_of_runs(label, runs, lambda row: row["status"] != "ok" and (row["status"], row.get("reason")))
        notes += [f"{whose} {end}: {why or 'no reason recorded'}" for (end, why), whose in failures]
    notes += [
        f"{_STALE_MARK} stale, {what}: {', '.join(labels)}" for what, labels in labels_by_staleness(table).items()
    ]
    disturbed: dict[str, list[str]] = {}
    for label, runs in labelled:
        for why, whose in _said_of_runs(label, runs, lambda row: row.get("disturbed")):
            disturbed.setdefault(why, []).append(whose)
    notes += [f"{_DISTURBED_MARK} disturbed, {why}: {', '.join(labels)}" for why, labels in disturbed.items()]
    for kernel, labels in labels_by_kernel(table).items():
        notes.append(f"attention ran as {kernel}, not one kernel for all: {', '.join(labels)}")
    return [sanitize(note) for note in notes]


def _said_of_runs(label: str, runs: Sequence[Record], said: Callable[[Row], Any]) -> list[tuple[Any, str]]:
    """What is said of a line's runs, and of which: the label alone where of all of them, else with their repeats."""
    repeats: dict[Any, list[str]] = {}
    for run in runs:
        if what := said(run.row):
            repeats.setdefault(what, []).append(str(run.row.get("repeat")))
    return [
        (what, label if len(found) == len(runs) else f"{label} repeat {', '.join(found)}")
        for what, found in repeats.items()
    ]


def fit_width(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """The columns that fit a width, and those left out: names are shortened, a number never is.

    As long as there is a column to leave out, no two names of a column become one.
    """
    fitted = [_limited(column, _LONGEST_TEXT) for column in columns]
    if _width(fitted) > width:
        fitted = [fitted[0], *(_limited(column, _SHORTER_TEXT) for column in fitted[1:])]
    left_out: list[Column] = []
    while _width(fitted) > width and any(column.drop for column in fitted):
        least = min((column for column in fitted if column.drop), key=lambda column: column.drop)
        left_out.append(least)
        fitted.remove(least)
    if _width(fitted) > width:
        fitted = [_limited(column, _SHORTEST_TEXT, at_any_rate=True) for column in fitted]
    return fitted, left_out


def _limited(column: Column, limit: int, at_any_rate: bool = False) -> Column:
    cells = [_cut(cell, limit) for cell in column.cells]
    merges = len(set(cells)) < len(set(column.cells))
    return column if column.number or (merges and not at_any_rate) else replace(column, cells=cells)


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _width(columns: Sequence[Column]) -> int:
    widest = [max(cell_len(text) for text in (*column.header, *column.cells)) for column in columns]
    return sum(widest) + _GAP * (len(columns) - 1)


def rich_table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        header = Text("\n".join(part for part in column.header if part))
        table.add_column(header, justify="right" if column.number else "left", no_wrap=True, vertical="bottom")
    for cells in zip(*(_hanging(column) for column in columns), strict=True):
        table.add_row(*(Text(cell, style=_COLOURS.get(cell.split(" ")[0], ""), justify="left") for cell in cells))
    return table


def _hanging(column: Column) -> list[str]:
    """A column's cells, padded so that numbers stand under each other and a mark hangs to their right."""
    if not column.number:
        return column.cells
    marked = any(cell.endswith(_UNSETTLED_MARK) for cell in column.cells)
    cells = [cell + " " if marked and not cell.endswith(_UNSETTLED_MARK) else cell for cell in column.cells]
    width = _width([column])
    return [cell.rjust(width) for cell in cells]


def terminal() -> Console:
    """Standard output at the terminal's width, or at 120 columns where it goes to a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
