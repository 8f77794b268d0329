"""What a paper needs of a comparison: a table with booktabs as wide as a column, captions of figures, and the CSV."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import Literal

import pandas as pd
from markupsafe import Markup

from harness.records.store import csv_cell
from harness.report.columns import ShownColumn, from_lines, name_columns, write
from harness.report.document import Chart, template
from harness.report.lines import Line, baseline_name, column_values, distinct_values
from harness.report.text import sentence
from harness.report.view import View, setting

Statistic = Literal["median", "mean"]

# The columns of speed by the statistic: over the runs that nothing disturbed, of which three or more have a spread.
_SPEEDS: dict[Statistic, tuple[tuple[str, Callable[[Sequence[float]], float]], ...]] = {
    "median": (("median", statistics.median), ("min", min), ("max", max)),
    "mean": (("mean", statistics.fmean), ("sd", statistics.stdev)),
}

# The order in which columns are left out where width is short. Speed and peak memory never are.
_RANKS, _PEAK_RATIO, _SPEED_RATIO, _SENT, _RUNS, _SPREAD = range(1, 7)

_GAP = 5.0  # points between two columns, twice what page/table.tex.j2 sets

_LABELS = "configuration"  # the title of the column of labels, whose cells may have several lines

_MOST_ROWS = (50, 20)  # of a table that fits a page, and of one whose rows have several lines

_BREAK = "\u200b"  # where LaTeX may break a long word

# The widths of characters in points, rounded up: those of Computer Modern at the 8 points of page/table.tex.j2. Times,
# which many papers have, is narrower. What is not listed is at most as wide as W.
_WIDTHS = {
    character: points
    for points, characters in (
        (2.4, "!',.:;[]`il"),
        (3.4, " -()_rstjf"),
        (4.3, "0123456789acegoz/*$–"),
        (4.8, "bdhknpquvxy?"),
        (6.8, f"w{ascii_uppercase.replace('M', '').replace('W', '')}"),
        (7.1, "m%#&+=<>×±"),
    )
    for character in characters
} | {_BREAK: 0.0}
_WIDEST = 8.8

_SPECIAL: dict[int, str] = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "\\": "\\textbackslash{}",
        "×": "$\\times$",
        "±": "$\\pm$",
        "·": "$\\cdot$",
        "−": "$-$",
        "–": "--",
        "…": "\\dots{}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        '"': "''",
        _BREAK: "\\allowbreak{}",
    }
)


def escape(text: object) -> Markup:
    """Return text that LaTeX typesets as it is, and may break within words of more than 18 characters.

    Characters of other alphabets than the Latin one, which LaTeX does not know by itself, become question marks.
    """
    known = re.sub(r"[^\x20-\u017f]", lambda match: match[0] if ord(match[0]) in _SPECIAL else "?", str(text))
    return Markup(re.sub(rf"[^\s{_BREAK}]{{19,}}", lambda word: _breakable(word[0]), known).translate(_SPECIAL))


def _breakable(text: str) -> str:
    """Return text that LaTeX may break at signs between words and within long ones."""
    return re.sub(r"[-_/+=:.,]|[^\W_]{6}", rf"\g<0>{_BREAK}", text)


def paper_csv(view: View, statistic: Statistic) -> str:
    """Return all columns of the table as CSV."""
    cells = {column.title: [*map(csv_cell, column.cells)] for column in _columns(view, statistic, math.inf)}
    return str(pd.DataFrame(cells).to_csv(index=False, lineterminator="\n"))


def latex_table(view: View, statistic: Statistic = "median", width: float | None = None) -> str:
    """Return the comparison as a LaTeX table in the style of booktabs, with notes below it.

    Where a width in millimetres is too narrow for all columns, the least important are left out, and a note has them.
    """
    lines, points = view.lines, math.inf if width is None else width / 25.4 * 72.27
    columns, left_out = _columns(view, statistic, points), list[ShownColumn]()
    most = points / 2 if columns[0].header == _LABELS else math.inf
    while _width(columns, most) > points and (least := min((c.drop for c in columns if c.drop), default=0)):
        left_out += [column for column in columns if column.drop == least]
        columns = [column for column in columns if column.drop != least]
    rows = list(zip(*(column.cells for column in columns), strict=True))
    per_part = _MOST_ROWS[most < math.inf]
    heads = [column.header.split("\n") for column in columns]
    return template("table.tex.j2", escape).render(
        name=re.sub(r"[^A-Za-z0-9]+", "-", view.name),
        caption=sentence("paper_caption", total=len(lines), columns=columns, setting=_setting(view)),
        heads=[[head[row] if row < len(head) else "" for head in heads] for row in range(max(map(len, heads)))],
        columns=columns,
        parts=[rows[first : first + per_part] for first in range(0, len(rows), per_part)],
        wrapped=round(_width(columns[:1], most), 1) if most < math.inf else None,
        width=width,
        notes=sentence(
            "paper_notes",
            titles=[column.title for column in columns],
            statistic=statistic,
            baseline=baseline_name(lines),
            lines=lines,
            unsettled=[line.label for line in lines if line.get("unsettled")],
            left_out=[column.title for column in left_out],
        ),
    )


def latex_figures(view: View, shown: Sequence[Chart], width: float | None = None) -> str:
    """Return the charts as LaTeX figures of a width in millimetres, or else as wide as the text around them."""
    return template("figures.tex.j2", escape).render(
        charts=shown, width=width, runs=sentence("paper_runs", lines=view.lines), setting=_setting(view)
    )


def _setting(view: View) -> str:
    """Return the model, precision, ranks, device and day, and what a step trained where all rows share it."""
    names = ("global_batch", "seq_len", "micro_batch", "checkpointing")
    shared = {name: values[0] for name in names if len(values := distinct_values(view.lines, name)) == 1}
    return sentence("paper_setting", setting=setting(view), shared=shared)


def _columns(view: View, statistic: Statistic, points: float) -> list[ShownColumn]:
    """Return the columns as texts, whose first figure is the status of a run that failed.

    Where the columns that tell rows apart leave no room for the essential ones there is one of labels instead, which
    has several lines.
    """
    lines = view.lines
    counts = [line.speed.runs if line.is_timed and line.speed.runs else None for line in lines]
    (center, middle), *spreads = _SPEEDS[statistic]
    figures = [
        ShownColumn(f"{center}\n{{unit}}", [_speed(line, middle) for line in lines], "speed"),
        *(
            ShownColumn(title, [_speed(line, of, is_spread=True) for line in lines], "speed", drop=_SPREAD)
            for title, of in spreads
        ),
        ShownColumn("n", counts if len({*counts} - {None}) > 1 else [], drop=_RUNS),
        replace(from_lines(lines, "tokens_per_second_ratio", "×\nspeed", "ratio"), drop=_SPEED_RATIO),
        from_lines(lines, "peak_allocated_bytes", "peak\n{unit}"),
        replace(from_lines(lines, "peak_allocated_bytes_ratio", "×\npeak", "ratio"), drop=_PEAK_RATIO),
        replace(from_lines(lines, "communication_bytes", "sent\n{unit}", "sent"), drop=_SENT),
    ]
    known = [column for column in figures if column.is_known] or [ShownColumn("status", [""] * len(lines))]
    first, *others = write(known)
    cells = [cell if line.ok else line.status for line, cell in zip(lines, first.cells, strict=True)]
    figures = [replace(first, cells=cells), *others]
    names, needed = _names(lines)
    essential = [column for column in figures if column.drop in (0, _RUNS, _SPREAD)]
    if _width([*needed, *essential]) > points:
        labels = [_breakable(label) for label in column_values(lines, "label")]
        return [ShownColumn(_LABELS, labels, number=False), *figures]
    return [*(replace(column, drop=0 if column in needed else _RANKS) for column in names), *figures]


def _speed(line: Line, of: Callable[[Sequence[float]], float], is_spread: bool = False) -> float | None:
    """Return a statistic of the speeds of a line's undisturbed runs, None where there are too few to know it."""
    speeds = [run.row["tokens_per_second"] for run in line.timed if run.row.get("tokens_per_second")]
    return of(speeds) if speeds and line.is_timed and (line.speed.is_ranked or not is_spread) else None


def _names(lines: Sequence[Line]) -> tuple[list[ShownColumn], list[ShownColumn]]:
    """Return the columns that differ between the rows, and the first of them that tell all rows apart."""
    first, *others = name_columns(lines, short=True)
    needed = names = [first, *(column for column in others if len({*column.cells}) > 1)]
    for column in names[:0:-1]:
        rest = [other for other in needed if other is not column]
        needed = rest if _distinct(rest) == _distinct(names) else needed
    return names, needed


def _distinct(columns: Sequence[ShownColumn]) -> int:
    """Return how many rows differ in these columns."""
    return len({*zip(*(column.cells for column in columns), strict=True)})


def _width(columns: Sequence[ShownColumn], most: float = math.inf) -> float:
    """Return the points of a table with these columns, of which the first is at most so wide."""
    widths = [
        max(sum(_WIDTHS.get(c, _WIDEST) for c in text) for text in (*column.header.split("\n"), *column.cells))
        for column in columns
    ]
    return min(widths[0], most) + sum(widths[1:]) + _GAP * (len(columns) - 1)
