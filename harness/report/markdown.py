"""The page report.md: the report for any Markdown reader, with its charts as SVG files beside it."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from markupsafe import Markup

from harness.report.charts import render
from harness.report.document import Section, charts, heading, template
from harness.util.files import atomic_write_text
from harness.util.text import sanitize

FIGURES = "figures"  # the folder of charts, beside report.md

_ACTIVE = re.compile(r"[\\`*\[\]<>|~#$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.|@")

_OPENS = re.compile(r"^(\d{0,9})([-+=.)])")  # a list, a rule or a heading's underline


def write(path: Path, title: str, sections: Sequence[Section], without_charts: str) -> dict[str, str]:
    """Write the page and, in the folder FIGURES beside it, its charts. Return these as SVG by their names.

    If they cannot be drawn, the page has none; the error's output says so in the words `without_charts`, and why.
    """
    drawn: dict[str, str] = {}
    with render.failure_told(without_charts):
        drawn = render.svgs({chart.name: chart.spec for chart in charts(sections)})
    for name, svg in drawn.items():
        figure = path.parent / FIGURES / f"{name}.svg"
        figure.parent.mkdir(exist_ok=True)
        atomic_write_text(figure, svg)
    atomic_write_text(path, page(title, sections, drawn))
    return drawn


def page(title: str, sections: Sequence[Section], drawn: Collection[str] = ()) -> str:
    """Return the whole page. A chart is a link to FIGURES/NAME.svg, left out if its name is not among those drawn."""
    filled = template("page.md.j2", lambda text: Markup(escape(text)), line=_line)
    return (
        filled.render(title=heading(sections, title), sections=sections, drawn=drawn, figures=FIGURES).strip("\n")
        + "\n"
    )


def _line(text: str) -> Markup:
    """Return escaped text that does not begin a list, a rule or a heading."""
    return Markup(_OPENS.sub(r"\1\\\2", escape(text)))


def escape(text: object) -> str:
    """Return any text as one line that Markdown shows as it is: without markup, links or the end of a cell."""
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
    return _ACTIVE.sub(lambda match: entities.get(match[0], "\\" + match[0]), sanitize(text))
