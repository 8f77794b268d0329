"""Tables in Markdown: any text as a cell that shows as it is."""

import re
from collections.abc import Sequence

import pandas as pd

from harness.errors import printable
from harness.report import comparison as c

_ACTIVE = re.compile(r"[\\`*\[\]<>|~#$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.|@")


def escape(text: object) -> str:
    """Any text as one line that Markdown shows as it is: no markup, no link, no cell's end."""
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
    return _ACTIVE.sub(lambda match: entities.get(match[0], "\\" + match[0]), printable(text))


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table of cells that are Markdown already; the first `names` columns are text, the others right-aligned."""
    rule = ["---" if position < names else "---:" for position in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def labelled(table: pd.DataFrame, columns: dict[str, list[str]], names: int = 1) -> str:
    """A table with a row a run and the columns given; runs of which all of them are empty are left out."""
    labels = [escape(label) for label in c.values(table, "label")]
    rows = [cells for cells in zip(labels, *columns.values(), strict=True) if any(cells[1:])]
    return grid(["run", *columns], rows, names)
