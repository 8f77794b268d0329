"""The terminal's table as lines and as cells."""

import io

from rich.console import Console

from harness.records.schema import Record
from harness.report.tables import print_table
from harness.report.view import View


def printed(entries: list[Record], width: int, only: set[str] | None = None) -> list[str]:
    text = io.StringIO()
    print_table(View("demo", entries), Console(file=text, width=width), only)
    return text.getvalue().splitlines()


def terminal_cells(lines: list[str], strategy: str) -> list[str]:
    return next(line for line in lines if line.startswith(strategy + " ")).split()
