"""Tables for the terminal: the comparison with its notes, and any table fitted to the terminal's width."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from harness.records.schema import Row
from harness.report.caveats import by_kind
from harness.report.columns import (
    DISTURBED_MARK,
    STALE_MARK,
    UNSETTLED_MARK,
    ShownColumn,
    abbreviations,
    comparison_columns,
    sanitized_texts,
)
from harness.report.comparability import group_by, shared_settings
from harness.report.decision import decision
from harness.report.document import Disturbed, Table
from harness.report.first_screen import first_answers, fits_table
from harness.report.lines import Line, baseline_name, labels_by, labels_by_kernel, rows_of
from harness.report.overview import pivots
from harness.report.text import MOST_LABELS, labels_text, sentence
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
    # The lines keep ratios to baselines that may not be shown.
    lines = [line for line in view.lines if only is None or any(run.run_id in only for run in line.runs)]
    if not lines:
        console.print(Text(sentence("no_runs")))
        return
    baseline = baseline_name(lines)
    caption = (shared_settings(rows_of(lines)), sentence("ratio_to", baseline=baseline) if baseline else "")
    console.print(Text(sanitize("; ".join(filter(None, caption)))))
    columns = comparison_columns(lines, short=True)
    fitted, left_out = fit_width([column for column in columns if not column.is_extra], console.width)
    console.print(rich_table(fitted), soft_wrap=False)
    more = [column.title for column in [*left_out, *(column for column in columns if column.is_extra)]]
    if more:
        console.print(Text(sentence("more_columns", titles=more), style="dim"))
    if len(view.records) < len(whole.records):
        console.print(Text(sentence("runs_shown", shown=len(view.records), total=len(whole.records))))
    for note in (*_legend(fitted), *_notes(lines)):
        console.print(Text(sanitize(note)))


def _legend(columns: Sequence[ShownColumn]) -> list[str]:
    """Return what the abbreviations and marks in these columns mean."""
    cells = [cell for column in columns if column.number for cell in column.cells]
    marks = {
        "mark_of_range": any(cell.endswith("]") for cell in cells),
        "mark_of_few_runs": any("(n = " in cell for cell in cells),
        "mark_of_uncertainty": any(cell.endswith(UNSETTLED_MARK) for cell in cells),
    }
    meanings = [sentence(kind, mark=UNSETTLED_MARK) for kind, is_used in marks.items() if is_used]
    return [*filter(None, [abbreviations(columns)]), *meanings]


def _notes(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a note for each failure with its reason, and for each kind of reason why rows are stale or disturbed."""
    total = len(lines)
    failures = _causes(lines, lambda row: row["status"] != "ok" and sentence("outcome", row=row))
    if len(failures) <= MOST_LABELS:
        for outcome, same in group_by(failures, itemgetter(1)).items():
            yield f"{', '.join(name for name, _ in same)} {outcome}"
    else:
        for outcome, names in by_kind(failures, "\n").items():
            yield f"{labels_text(_configurations(names), total)} {outcome}"
    disturbed = by_kind(_causes(lines, lambda row: row.get("noise_warning")))
    brief = [line.label for line in lines if line.speed.is_disturbed and not line.get("noise_warning")]
    differences = labels_by(lines, lambda line: line.get("stale_reason"))
    concerned = {
        "note_of_stale_rows": differences,
        "note_of_disturbances": {cause: _configurations(names) for cause, names in disturbed.items()},
        "note_of_few_steps": {"": brief} if brief else {},
        "note_of_kernels": labels_by_kernel(lines),
    }
    marks = {"stale": STALE_MARK, "disturbed": DISTURBED_MARK}
    for kind, by_cause in concerned.items():
        yield from (sentence(kind, cause=cause, of=of, total=total, marks=marks) for cause, of in by_cause.items())


def _configurations(names: Sequence[str]) -> list[str]:
    """Return the labels without repeats where they are too many to be listed."""
    if len(names) <= MOST_LABELS:
        return list(names)
    return list(dict.fromkeys(name.split(" repeat ")[0] for name in names))


def _causes(lines: Sequence[Line], cause_of: Callable[[Row], Any]) -> list[tuple[str, Any]]:
    """Return each line's label with each cause that its runs have, and with their repeats if not all have it."""
    causes = []
    for line in lines:
        for cause, affected in group_by(line.runs, lambda run: cause_of(run.row)).items():
            repeats = ", ".join(str(run.row.get("repeat")) for run in affected)
            name = line.label if len(affected) == len(line.runs) else f"{line.label} repeat {repeats}"
            causes += [(name, cause)] if cause else []
    return causes


def fit_width(columns: Sequence[ShownColumn], width: int) -> tuple[list[ShownColumn], list[ShownColumn]]:
    """Return the columns that fit a width, and those left out. Texts are shortened, numbers never are.

    Texts of a column stay distinct as long as there is a column to leave out instead.
    """
    fitted = [_shorten(column, _LONGEST_TEXT) for column in columns]
    if _width(fitted) > width:
        fitted = [fitted[0], *(_shorten(column, _SHORTER_TEXT) for column in fitted[1:])]
    left_out: list[ShownColumn] = []
    while _width(fitted) > width and any(column.drop for column in fitted):
        least = min((column for column in fitted if column.drop), key=lambda column: column.drop)
        left_out.append(least)
        fitted.remove(least)
    if _width(fitted) > width:
        fitted = [_shorten(column, _SHORTEST_TEXT, may_merge=True) for column in fitted]
    return fitted, left_out


def _shorten(column: ShownColumn, limit: int, may_merge: bool = False) -> ShownColumn:
    cells = [cell if isinstance(cell, Disturbed) else _cut(cell, limit) for cell in column.cells]
    merges = len(set(cells)) < len(set(column.cells))
    return column if column.number or (merges and not may_merge) else replace(column, cells=cells)


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _width(columns: Sequence[ShownColumn]) -> int:
    widest = [max(cell_len(text) for text in (*column.header.split("\n"), *column.cells)) for column in columns]
    return sum(widest) + _GAP * (len(columns) - 1)


def rich_table(columns: Sequence[ShownColumn]) -> RichTable:
    """Return the columns as a table that rich prints; figures to ignore are dim and struck through."""
    table = RichTable(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            Text(column.header.strip()), justify="right" if column.number else "left", no_wrap=True, vertical="bottom"
        )
    for row in zip(*map(_texts, columns), strict=True):
        table.add_row(*row)
    return table


def _texts(column: ShownColumn) -> list[Text]:
    """Return a column's cells in their styles, padded so that numbers are aligned and marks hang to their right."""
    shown, width = column.cells, _width([column])
    if column.number:
        marked = any(cell.endswith(UNSETTLED_MARK) for cell in shown)
        shown = [cell + " " if marked and not cell.endswith(UNSETTLED_MARK) else cell for cell in shown]
        shown = [cell.rjust(width) for cell in shown]
    styles = ("dim strike" if isinstance(cell, Disturbed) else _COLORS.get(cell.split(" ")[0]) for cell in column.cells)
    return [Text(text, style=style or "", justify="left") for text, style in zip(shown, styles, strict=True)]


def terminal() -> Console:
    """Return standard output at the terminal's width, or at 120 columns if it goes to a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def print_answers(view: View, console: Console, pivot: str | None = None, fits_in: int | None = None) -> None:
    """Print what came of the comparison, below its table: the requested pivot, what fits in memory, and the answers.

    Args:
        view: The runs to compare.
        console: Where to print.
        pivot: A column of runs.csv to tabulate strategies against.
        fits_in: The memory in bytes that a recommendation has to fit in.
    """
    if not view.records:
        return
    sections = pivots(truncate(view, MOST), pivot) if pivot is not None else []
    for table in (*(part for section in sections for part in section.parts), fits_table(view)):
        if isinstance(table, Table):
            _print_document(table, console)
    text, rest = map(sanitize, decision(view, fits_in))
    console.print(Text.assemble((text, "bold"), f" {rest}"))
    for lead, text in first_answers(view, fits_in):
        console.print(Text.assemble((f"{sanitize(lead)}: ", "bold"), sanitize(text)))


def _print_document(table: Table, console: Console) -> None:
    """Print a table of the report."""
    columns = [
        ShownColumn(sanitize(title), sanitized_texts(cells), number=position >= table.label_columns)
        for position, (title, cells) in enumerate(zip(table.header, zip(*table.rows, strict=True), strict=True))
    ]
    fitted, _ = fit_width(columns, console.width)
    console.print()
    if table.caption:
        console.print(Text(f"{sanitize(table.caption)}:"))
    console.print(rich_table(fitted), soft_wrap=False)
