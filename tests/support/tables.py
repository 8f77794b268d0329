"""What a reader sees of a report as plain text: its page, and the terminal's table as lines and as cells."""

import dataclasses
import html
import io
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from harness.records.schema import Record
from harness.report import markdown
from harness.report.sections import sections
from harness.report.tables import print_table
from harness.report.view import View


def printed(entries: list[Record], width: int, only: set[str] | None = None) -> list[str]:
    text = io.StringIO()
    print_table(View("demo", entries), Console(file=text, width=width), only)
    return text.getvalue().splitlines()


def terminal_cells(lines: list[str], strategy: str) -> list[str]:
    return next(line for line in lines if line.startswith(strategy + " ")).split()


def page(name: str, entries: Sequence[Record], problems: Sequence[str] = (), **options: Any) -> str:
    """Return report.md of these records."""
    return markdown.page(name, sections(View(name, list(entries), list(problems)), **options))


def page_text(entries: Sequence[Record], problems: Sequence[str] = (), **options: Any) -> str:
    """Return report.md without the escapes of Markdown."""
    return html.unescape(re.sub(r"\\(.)", r"\1", page("demo", entries, problems, **options)))


def changed(
    entries: Sequence[Record], *strategies: str, parts: dict[str, Any] | None = None, **row: Any
) -> list[Record]:
    """Return the records with other values in their rows and further parts, of these strategies or of all."""
    changes = {"row": row} | (parts or {})
    return [
        dataclasses.replace(entry, **{name: getattr(entry, name) | values for name, values in changes.items()})
        if not strategies or entry.row["strategy"] in strategies
        else entry
        for entry in entries
    ]
