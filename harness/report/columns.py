"""The columns of tables: declared as values of a kind, and written as texts in one unit for all values of that kind.

Those of the comparison are the same for the terminal and the page.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

from harness.records.schema import COLUMNS
from harness.report.comparability import varying_columns
from harness.report.document import Disturbed, Table
from harness.report.labels import cell_text, column_title
from harness.report.lines import RATIO_COLUMNS, Line, baseline_name, column_values, distinct_values, rows_of
from harness.report.text import (
    BYTES,
    FLOPS,
    FRACTION,
    MILLISECONDS,
    ONE,
    PERCENT,
    RATIO,
    Unit,
    deviation_text,
    format_numbers,
    unit_of,
)
from harness.util.text import sanitize

# The units that the numbers of a kind share throughout a table, and the forms of kinds that have none.
_UNITS: dict[str, Sequence[Unit]] = {
    "bytes": BYTES,
    "sent": BYTES,
    "flops": FLOPS,
    "flop rate": FLOPS,
    "ms": [MILLISECONDS],
    "speed": (Unit("Mtok/s", 1e6), Unit("ktok/s", 1e3), Unit("tok/s", 1)),
    "share": [Unit("%", 0.01)],
    "number": [ONE],
    "ratio": [RATIO],
    "percent": [PERCENT],
    "fraction": [FRACTION],
}
_FORMS: dict[str, Callable[[Any], str]] = {
    "deviation": deviation_text,
    "change": lambda value: f"{100 * value:+.1f}",  # in percent
    "text": lambda value: value if isinstance(value, str) else str(value),  # which may be Disturbed
}
_KIND_OF_UNIT = {"bytes": "bytes", "seconds": "ms", "fraction": "percent", "relative": "deviation", "": "text"}


@dataclass(frozen=True)
class ShownColumn:
    """A column of a table; before it is written its cells are values, then texts, of which some may be Disturbed."""

    header: str  # one or two lines; {unit} stands for the unit of the column's kind
    cells: Sequence[Any]
    kind: str = "text"
    number: bool = True
    drop: int = 0  # the order in which columns are left out where width is short; a column with 0 is always shown
    key: str = ""  # the column of runs.csv, if it is one
    is_extra: bool = False  # whether it is shown on demand only
    ignored: Sequence[bool] = ()  # whether each figure is to be ignored, as something disturbed its run

    @property
    def title(self) -> str:
        """The header on one line."""
        return self.header.strip().replace("\n", " ")

    @property
    def is_known(self) -> bool:
        """Whether any cell has a value."""
        return any(cell not in (None, "") for cell in self.cells)


def from_lines(
    lines: Sequence[Line], name: str, header: str = "", kind: str = "", is_timed: bool = False
) -> ShownColumn:
    """Return a column of lines; its title and its kind are those of the registry, if they are not given."""
    if not kind:
        kind = "bytes" if name.endswith("_bytes") else _KIND_OF_UNIT[COLUMNS[name].unit]
    ignored = column_values(lines, "is_ignored") if is_timed else ()
    return ShownColumn(header or COLUMNS[name].title, column_values(lines, name), kind, ignored=ignored)


def write(columns: Sequence[ShownColumn]) -> list[ShownColumn]:
    """Return the columns as texts. Figures that are to be ignored are Disturbed."""
    units = units_of(columns)
    return [_written(column, units.get(column.kind, ONE)) for column in columns]


def _written(column: ShownColumn, unit: Unit) -> ShownColumn:
    """Return a column as texts, its numbers in a unit."""
    if column.kind in _UNITS:
        cells = format_numbers(column.cells, unit)
    else:
        cells = ["" if value is None else _FORMS[column.kind](value) for value in column.cells]
    if column.ignored:
        cells = [
            Disturbed(cell) if cell and ignored else cell for cell, ignored in zip(cells, column.ignored, strict=True)
        ]
    return replace(column, header=column.header.replace("{unit}", unit.name), cells=cells, kind="text", ignored=())


def units_of(columns: Sequence[ShownColumn]) -> dict[str, Unit]:
    """Return the unit of each kind, which all its columns share."""
    return {
        kind: unit_of([value for column in columns if column.kind == kind for value in column.cells], units)
        for kind, units in _UNITS.items()
    }


def table_of(columns: Sequence[ShownColumn], caption: str = "") -> Table:
    """Return the columns, written or not, as a table under a caption, those of text first."""
    unit = units_of(columns)["bytes"].name
    columns = write(columns)
    rows = list(zip(*(column.cells for column in columns), strict=True))
    label_columns = next((position for position, column in enumerate(columns) if column.number), len(columns))
    return Table([column.title for column in columns], rows, label_columns, caption, unit=unit)


def line_table(lines: Sequence[Line], columns: Sequence[ShownColumn], caption: str = "") -> Table | None:
    """Return a table with one row per line, without empty columns of figures and without lines that have no cell.

    Return None where no line has a cell.
    """
    shown = [column for column in columns if column.is_known or not column.number]
    is_known = [any(cell not in (None, "") for cell in cells) for cells in zip(*(c.cells for c in shown), strict=True)]
    shown = [ShownColumn("run", [line.label for line in lines], number=False), *shown]
    shown = [
        replace(column, cells=list(compress(column.cells, is_known)), ignored=list(compress(column.ignored, is_known)))
        for column in shown
    ]
    return table_of(shown, caption) if any(is_known) else None


STALE_MARK, DISTURBED_MARK, UNSETTLED_MARK = "†", "‡", "~"

_SHORT_KINDS = {"selective": "sel", "attention": "attn"}  # of checkpointing

_DROP_NAMES = 100  # columns of names are left out after every number that may be


@dataclass(frozen=True)
class Word:
    """A word of a header, its abbreviation for the terminal, and the legend's explanation of the abbreviation."""

    full: str
    short: str
    meaning: str

    @property
    def on_one_line(self) -> str:
        """The abbreviation where a header has it on one line."""
        return self.short.replace("\n", " ")


_FILE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("comparison.toml").read_text("utf-8"))
WORDS = {name: Word(**word) for name, word in _FILE["words"].items()}
_DECLARED = {
    name: (facts.pop("header"), facts.pop("is_timed", False), facts) for name, facts in _FILE["columns"].items()
}


def comparison_columns(lines: Sequence[Line], short: bool) -> list[ShownColumn]:
    """Return the columns of the main table, without columns of numbers that are empty throughout.

    Eight come first, with those that vary beside them: strategy, ranks, speed, its ratio, peak memory, its ratio,
    communication and status. The others are extra.

    Args:
        lines: The lines.
        short: Whether to abbreviate headers and kinds of checkpointing, for the terminal.
    """
    words = {name: word.short if short else word.full for name, word in WORDS.items()}
    marks = [UNSETTLED_MARK if line.get("unsettled") else "" for line in lines]
    ratios = format_numbers(column_values(lines, "tokens_per_second_ratio"), RATIO)
    ignored = column_values(lines, "is_ignored")
    texts = {
        "tokens_per_second": speed_texts(lines),
        "tokens_per_second_ratio": [text and text + mark for text, mark in zip(ratios, marks, strict=True)],
        "status": [_status(line) for line in lines],
    }
    hidden = set() if len(distinct_values(lines, "grad_accumulation")) > 1 else {"grad_accumulation"}
    hidden |= set() if baseline_name(lines) else {f"{name}_ratio" for name in RATIO_COLUMNS}
    columns = [
        ShownColumn(
            **({"key": name} | facts),
            header=header.format_map(words | {"unit": "{unit}"}),
            cells=texts.get(name) or column_values(lines, name),
            ignored=ignored if is_timed else (),
        )
        for name, (header, is_timed, facts) in _DECLARED.items()
        if name not in hidden
    ]
    return write([*name_columns(lines, short), *(column for column in columns if column.is_known)])


def abbreviations(columns: Sequence[ShownColumn]) -> str:
    """Return a legend of the abbreviations and terms in the headers of these columns; empty if there are none."""
    titles = [column.title for column in columns]
    meanings: dict[str, list[str]] = {}
    for word in WORDS.values():
        if word.meaning and any(word.on_one_line in title for title in titles):
            meanings.setdefault(word.meaning, []).append(word.on_one_line)
    return "; ".join(f"{', '.join(words)}: {meaning}" for meaning, words in meanings.items())


def name_columns(lines: Sequence[Line], short: bool) -> list[ShownColumn]:
    """Return the columns that distinguish the rows; the number of ranks is shown even where all have the same."""
    columns = [ShownColumn("strategy", sanitized_texts(column_values(lines, "strategy")), number=False)]
    if len(distinct_values(lines, "checkpointing")) > 1:
        kinds = sanitized_texts(column_values(lines, "checkpointing"))
        cells = [_SHORT_KINDS.get(kind, kind) if short else kind for kind in kinds]
        title = WORDS["checkpointing"].short if short else WORDS["checkpointing"].full
        columns.append(ShownColumn(title, cells, number=False))
    names = ["world_size", *(name for name in varying_columns(rows_of(lines)) if name != "world_size")]
    return columns + [
        ShownColumn(
            column_title(name, short),
            sanitized_texts(column_values(lines, name)),
            number=False,
            drop=_DROP_NAMES + len(names) - position,
            key=name,
        )
        for position, name in enumerate(names)
    ]


def speed_texts(lines: Sequence[Line]) -> list[str]:
    """Return every speed with the range over its runs, or with their number where there are too few to rank it."""
    medians = format_numbers(column_values(lines, "tokens_per_second"), ONE)
    return [text and text + _behind(text, line) for text, line in zip(medians, lines, strict=True)]


def _behind(median: str, line: Line) -> str:
    """Return what stands behind a median: a mark if it is to be ignored, else its range or the number of its runs."""
    if line.speed.is_disturbed:
        return f" {DISTURBED_MARK}"
    if not line.speed.is_ranked:
        return f" (n = {line.get('timed_runs') or 1})"
    decimals = len(median.partition(".")[2])  # as many as the median has
    return f" [{line.speed.low:,.{decimals}f}–{line.speed.high:,.{decimals}f}]"


def _status(line: Line) -> str:
    """Return the line's status, how many of its runs have it if not all do, and the marks of the notes below."""
    alike, runs = line.get("runs_alike"), line.get("runs")
    return (
        line.status
        + (f" {alike}/{runs}" if alike != runs else "")
        + (f" {STALE_MARK}" if line.get("stale_reason") else "")
        + (f" {DISTURBED_MARK}" if line.speed.is_disturbed else "")
    )


def sanitized_texts(cells: Sequence[object]) -> list[str]:
    """Return values as texts that a terminal can print, empty where unknown."""
    return ["" if cell is None else sanitize(cell_text(cell)) for cell in cells]
