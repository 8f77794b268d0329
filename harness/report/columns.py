"""The columns of tables: declared as values of a kind, and written as texts in one unit for all values of that kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from harness.records.columns import column as registered
from harness.report.document import Disturbed, Table
from harness.report.lines import Line, column_values
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

# The units that the numbers of a kind share throughout a table, and the forms of kinds that have none.
_UNITS: dict[str, Sequence[Unit]] = {
    "bytes": BYTES,
    "sent": BYTES,
    "flops": FLOPS,
    "flop rate": FLOPS,
    "ms": [MILLISECONDS],
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
        kind = "bytes" if name.endswith("_bytes") else _KIND_OF_UNIT[registered(name).unit]
    ignored = column_values(lines, "is_ignored") if is_timed else ()
    return ShownColumn(header or registered(name).title, column_values(lines, name), kind, ignored=ignored)


def write(columns: Sequence[ShownColumn]) -> list[ShownColumn]:
    """Return the columns as texts. Figures that are to be ignored are Disturbed."""
    units = units_of(columns)
    written = []
    for column in columns:
        unit = units.get(column.kind, ONE)
        if column.kind in _UNITS:
            cells = format_numbers(column.cells, unit)
        else:
            cells = ["" if value is None else _FORMS[column.kind](value) for value in column.cells]
        if column.ignored:
            known = zip(cells, column.ignored, strict=True)
            cells = [Disturbed(cell) if cell and is_ignored else cell for cell, is_ignored in known]
        header = column.header.replace("{unit}", unit.name)
        written.append(replace(column, header=header, cells=cells, kind="text", ignored=()))
    return written


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
