"""The page report.md: the report for any Markdown reader, with its charts as SVG files beside it."""

import re
from collections.abc import Collection, Iterator, Sequence

from harness.report.document import Banner, Best, BulletList, Chart, Disturbed, Paragraph, Part, Section, Table
from harness.util.text import sanitize

FIGURES = "figures"  # the folder of charts, beside report.md

_ACTIVE = re.compile(r"[\\`*\[\]<>|~#$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.|@")

_OPENS = re.compile(r"^(\d{0,9})([-+=.)])")  # a list, a rule or a heading's underline


def page(title: str, sections: Sequence[Section], drawn: Collection[str] = ()) -> str:
    """Return the whole page. A chart is a link to FIGURES/NAME.svg, left out if its name is not among those drawn."""
    parts = [f"# {escape(title)}", *(text for section in sections for text in _section(section, 2, drawn))]
    return "\n\n".join(parts) + "\n"


def _section(section: Section, level: int, drawn: Collection[str]) -> Iterator[str]:
    if section.title:
        yield f"{'#' * level} {escape(section.title)}"
    for part in section.parts:
        yield from _part(part, drawn)
    for inner in section.inner:
        yield from _section(inner, level + 1, drawn)


def _part(part: Part, drawn: Collection[str]) -> Iterator[str]:
    match part:
        case Paragraph(text):
            yield _line(text)
        case Banner(text):
            yield f"> **{escape(text)}**"
        case BulletList(items):
            yield "\n".join(f"- {_item(lead, text)}" for lead, text in items)
        case Table():
            yield from [_line(f"{part.caption}:")] if part.caption else []
            yield from _tables(part)
        case Chart(name, _, alt_text) if name in drawn:
            yield f"![{escape(alt_text)}]({FIGURES}/{name}.svg)"


def _item(lead: str, text: str) -> str:
    return f"**{escape(lead)}**: {escape(text)}" if lead else _line(text)


def _tables(table: Table) -> Iterator[str]:
    """Yield a table, and one of the columns that a page shows on demand."""
    if not table.extra:
        yield format_table(table)
        return
    positions = range(len(table.header))
    yield format_table(_select(table, [position for position in positions if position not in table.extra]))
    yield "More columns:"
    yield format_table(
        _select(
            table, [position for position in positions if position < table.label_columns or position in table.extra]
        )
    )


def _select(table: Table, positions: Sequence[int]) -> Table:
    """Return the table with these of its columns, among them all label columns."""
    rows = [[cells[position] for position in positions] for cells in table.rows]
    return Table([table.header[position] for position in positions], rows, table.label_columns)


def format_table(table: Table) -> str:
    """Return a table with its label columns aligned left and the others right."""
    rule = ["---" if position < table.label_columns else "---:" for position in range(len(table.header))]
    rows = [[_cell(cell) for cell in cells] for cells in (table.header, *table.rows)]
    rows.insert(1, rule)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _cell(cell: str) -> str:
    if isinstance(cell, Disturbed):
        return f"~~{escape(cell)}~~"
    return f"**{escape(cell)}**" if isinstance(cell, Best) else escape(cell)


def _line(text: str) -> str:
    """Return escaped text that does not begin a list, a rule or a heading."""
    return _OPENS.sub(r"\1\\\2", escape(text))


def escape(text: object) -> str:
    """Return any text as one line that Markdown shows as it is: without markup, links or the end of a cell."""
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
    return _ACTIVE.sub(lambda match: entities.get(match[0], "\\" + match[0]), sanitize(text))
