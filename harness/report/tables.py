"""Tables for the terminal: the comparison with its notes, and any table fitted to the terminal's width."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.records.schema import Record, Row
from harness.report.comparison_columns import (
    DISTURBED_MARK,
    STALE_MARK,
    UNSETTLED_MARK,
    Column,
    abbreviations,
    comparison_columns,
    sanitized_texts,
)
from harness.report.frame import (
    baseline_names,
    column_values,
    labels_by_kernel,
    labels_by_staleness,
    shared_settings,
)
from harness.report.text import outcome_text
from harness.report.view import MOST, View, truncate
from harness.util.text import sanitize

PIPED_WIDTH = 120

_GAP = 2  # characters between columns

_LONGEST_TEXT, _SHORTER_TEXT, _SHORTEST_TEXT = 20, 12, 8  # characters of a cell that is not a number

_COLORS = {"ok": "green", "refused": "yellow", "interrupted": "yellow", "oom": "red", "timeout": "red", "error": "red"}


def print_table(view: View, console: Console, only: Collection[str] | None = None) -> None:
    """Print the comparison within the console's width, one line for all repeats, with notes on failures below it.

    Args:
        view: The runs to compare.
        console: Where to print.
        only: The ids of the runs whose lines to show; the others serve as baselines. By default all are shown.
    """
    whole, view = view, view if only is not None else truncate(view, MOST)
    lines, table = view.lines, view.line_medians
    if only is not None:
        is_shown = [any(run.run_id in only for run in line.runs) for line in lines]
        table = table[is_shown].reset_index(drop=True)  # the rows keep ratios to baselines that may not be shown
        lines = [line for line, shown in zip(lines, is_shown, strict=True) if shown]
    if table.empty:
        console.print(Text("no runs recorded"))
        return
    console.print(Text("; ".join(sanitized_texts(shared_settings(table)) + _caption(table))))
    columns, left_out = fit_width(comparison_columns(table, short=True), console.width)
    console.print(rich_table(columns), soft_wrap=False)
    width = console.width
    if left_out:
        names = ", ".join(column.title for column in left_out)
        console.print(Text(f"columns left out to fit {width} characters: {names}", style="dim"))
    if len(view.records) < len(whole.records):
        console.print(Text(f"{len(view.records)} of {len(whole.records)} runs are shown; runs.csv has all of them"))
    for note in (*_legend(columns), *_notes(table, lines)):
        console.print(Text(note))


def _caption(table: pd.DataFrame) -> list[str]:
    names = baseline_names(table)
    return [f"× is the ratio to {sanitize(names)}"] if names else []


def _legend(columns: Sequence[Column]) -> list[str]:
    """Return what the abbreviations and marks in these columns mean."""
    meanings = {
        abbreviations(columns): bool(abbreviations(columns)),
        "± is half the range of tokens per second between runs over their median": any(
            column.header[0] == "±" for column in columns
        ),
        f"{UNSETTLED_MARK} marks a difference within the spread (±; for a single run, the spread of its steps)": any(
            cell.endswith(UNSETTLED_MARK) for column in columns if column.number for cell in column.cells
        ),
    }
    return [meaning for meaning, is_used in meanings.items() if is_used]


def _notes(table: pd.DataFrame, lines: Sequence[Record]) -> list[str]:
    """Return a note for each failure with its reason, and for each reason why rows are stale or disturbed."""
    labelled = list(zip(column_values(table, "label"), (line.runs for line in lines), strict=True))
    notes: list[str] = []
    for label, runs in labelled:
        failures = _by_value(label, runs, lambda row: row["status"] != "ok" and outcome_text(row))
        notes += [f"{name} {outcome}" for outcome, name in failures]
    notes += [
        f"{STALE_MARK} stale, recorded with other versions than are installed ({difference}): {', '.join(labels)}"
        for difference, labels in labels_by_staleness(table).items()
    ]
    disturbed: dict[str, list[str]] = {}
    for label, runs in labelled:
        for cause, name in _by_value(label, runs, lambda row: row.get("noise_warning")):
            disturbed.setdefault(cause, []).append(name)
    notes += [f"{DISTURBED_MARK} noise warning ({cause}): {', '.join(labels)}" for cause, labels in disturbed.items()]
    for kernel, labels in labels_by_kernel(table).items():
        notes.append(f"attention kernels differ between rows; {kernel} ran for: {', '.join(labels)}")
    return [sanitize(note) for note in notes]


def _by_value(label: str, runs: Sequence[Record], value_of: Callable[[Row], Any]) -> list[tuple[Any, str]]:
    """Return the values that a line's runs have, each with the label, and with repeats if not all runs have it."""
    repeats: dict[Any, list[str]] = {}
    for run in runs:
        if value := value_of(run.row):
            repeats.setdefault(value, []).append(str(run.row.get("repeat")))
    return [
        (value, label if len(indices) == len(runs) else f"{label} repeat {', '.join(indices)}")
        for value, indices in repeats.items()
    ]


def fit_width(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that fit a width, and those left out. Texts are shortened, numbers never are.

    Texts of a column stay distinct as long as there is a column to leave out instead.
    """
    fitted = [_shorten(column, _LONGEST_TEXT) for column in columns]
    if _width(fitted) > width:
        fitted = [fitted[0], *(_shorten(column, _SHORTER_TEXT) for column in fitted[1:])]
    left_out: list[Column] = []
    while _width(fitted) > width and any(column.drop for column in fitted):
        least = min((column for column in fitted if column.drop), key=lambda column: column.drop)
        left_out.append(least)
        fitted.remove(least)
    if _width(fitted) > width:
        fitted = [_shorten(column, _SHORTEST_TEXT, may_merge=True) for column in fitted]
    return fitted, left_out


def _shorten(column: Column, limit: int, may_merge: bool = False) -> Column:
    cells = [_cut(cell, limit) for cell in column.cells]
    merges = len(set(cells)) < len(set(column.cells))
    return column if column.number or (merges and not may_merge) else replace(column, cells=cells)


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _width(columns: Sequence[Column]) -> int:
    widest = [max(cell_len(text) for text in (*column.header, *column.cells)) for column in columns]
    return sum(widest) + _GAP * (len(columns) - 1)


def rich_table(columns: Sequence[Column]) -> Table:
    """Return the columns as a table that rich prints."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        header = Text("\n".join(part for part in column.header if part))
        table.add_column(header, justify="right" if column.number else "left", no_wrap=True, vertical="bottom")
    for cells in zip(*(_hanging(column) for column in columns), strict=True):
        table.add_row(*(Text(cell, style=_COLORS.get(cell.split(" ")[0], ""), justify="left") for cell in cells))
    return table


def _hanging(column: Column) -> list[str]:
    """Return a column's cells, padded so that numbers are aligned and marks hang to their right."""
    if not column.number:
        return column.cells
    marked = any(cell.endswith(UNSETTLED_MARK) for cell in column.cells)
    cells = [cell + " " if marked and not cell.endswith(UNSETTLED_MARK) else cell for cell in column.cells]
    width = _width([column])
    return [cell.rjust(width) for cell in cells]


def terminal() -> Console:
    """Return standard output at the terminal's width, or at 120 columns if it goes to a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
