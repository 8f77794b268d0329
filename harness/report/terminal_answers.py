"""The last lines of a command in the terminal: the requested pivot, what fits in memory, and the answers."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from harness.report.comparison_columns import Column, sanitized_texts
from harness.report.document import Part, Table
from harness.report.first_screen import first_screen
from harness.report.overview import pivots
from harness.report.tables import fit_width, rich_table
from harness.report.view import MOST, View, truncate
from harness.util.text import sanitize


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
    for section in pivots(truncate(view, MOST), pivot) if pivot is not None else []:
        _print_document(section.parts, console)
    screen = first_screen(view, fits_in)
    if screen.fits is not None:
        _print_document([screen.fits], console)
    for lead, text in screen.answers:
        console.print(Text.assemble((f"{sanitize(lead)}: ", "bold"), sanitize(text)))


def _print_document(parts: Sequence[Part], console: Console) -> None:
    """Print the tables among the parts of a section."""
    for table in (part for part in parts if isinstance(part, Table)):
        cells = list(zip(*table.rows, strict=True))
        columns = [
            Column((sanitize(title), ""), sanitized_texts(cells[position]), position >= table.label_columns)
            for position, title in enumerate(table.header)
        ]
        fitted, _ = fit_width(columns, console.width)
        console.print()
        if table.caption:
            console.print(Text(f"{sanitize(table.caption)}:"))
        console.print(rich_table(fitted), soft_wrap=False)
