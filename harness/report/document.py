"""A report as data: sections of paragraphs, lists, tables and charts.

All text is plain; the templates of a page escape it as its language needs.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

VegaLite = dict[str, Any]  # a specification, as JSON


class Best(str):
    """A cell with the best figure of its column."""


class Disturbed(str):
    """A cell with a figure that is not to be compared: something disturbed its run, or too few steps were timed."""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Decision:
    """The sentence that decides, before all others, and what it leaves open."""

    text: str
    rest: str = ""


@dataclass(frozen=True)
class Banner:
    """A paragraph in a frame, which readers have to see before they read on."""

    text: str


@dataclass(frozen=True)
class BulletList:
    """A list of items, each with a lead, which may be empty, and a text."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table whose first `label_columns` columns are text and whose other are numbers.

    A cell may be a Best or a Disturbed.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    label_columns: int = 1
    caption: str = ""
    strategies: Sequence[str] = ()  # of each row, if the page can hide rows by strategy
    extra: Collection[int] = ()  # the positions of columns that the page shows on demand
    keys: Sequence[str] = ()  # the column of runs.csv that each column shows, "" for none
    unit: str = ""  # of its sizes in bytes, which share one


@dataclass(frozen=True)
class Chart:
    """A chart, with a sentence and a table of the same content."""

    name: str  # of its file without the suffix; consists of letters, digits and hyphens
    title: str
    alt_text: str  # a sentence for readers who do not see the chart: what is drawn, and its range
    spec: VegaLite  # its data have a field `strategy` by which the page hides marks
    table: Table  # the exact values
    measure: int = 0  # the table's column whose range the page states for what is visible; 0 if there is none


@dataclass(frozen=True)
class MemorySlider:
    """A slider of a device's memory that says what fits, and dims all else in the table that follows it."""

    device_gib: float  # the memory of the device that it starts from
    entries: Sequence[tuple[float, str, float]]  # GiB, label and tokens per second of each row, the fastest first
    text: str  # what it says at the start, for pages without scripts

    @property
    def most(self) -> int:
        """The memory at the slider's right end, in GiB."""
        return math.ceil(max([self.device_gib, *(gib for gib, *_ in self.entries)])) + 1


Part = Decision | Paragraph | Banner | BulletList | Table | Chart | MemorySlider


@dataclass(frozen=True)
class Section:
    """A heading with its parts and its subsections."""

    title: str
    parts: Sequence[Part]
    inner: Sequence["Section"] = field(default_factory=tuple)
    heading: str = ""  # of the whole page, if it is not the page's name
    is_first: bool = False  # whether a page shows its chart beside its text, on one screen
    is_folded: bool = False  # whether a page and its print show the heading alone, until the reader opens it


def section(title: str, *parts: Part | None, inner: Sequence[Section] = (), **looks: Any) -> list[Section]:
    """Return the section in a list, which is empty if the section would be; `looks` are its other fields."""
    known = [part for part in parts if part is not None]
    return [Section(title, known, inner, **looks)] if known or inner else []


def bullets(sentences: Iterable[str]) -> BulletList | None:
    """Return sentences as a list, None if there are none."""
    items = [("", sentence) for sentence in sentences]
    return BulletList(items) if items else None


def heading(sections: Iterable[Section], name: str) -> str:
    """Return the heading of a page with these sections, by default its name."""
    return next((section.heading for section in sections if section.heading), name)


def walk(sections: Iterable[Section]) -> Iterator[Section]:
    """Yield all sections in the order in which they are read."""
    for section in sections:
        yield section
        yield from walk(section.inner)


def charts(sections: Iterable[Section]) -> Iterator[Chart]:
    """Yield the charts in the order in which they are read."""
    yield from (part for section in walk(sections) for part in section.parts if isinstance(part, Chart))


FOLDER = Path(__file__).parent / "page"

_KINDS = (Decision, Banner, Paragraph, BulletList, Table, Chart, MemorySlider, Best, Disturbed)


def template(name: str, escape: Callable[[Any], str], **filters: Callable[..., Any]) -> jinja2.Template:
    """Return a template of a page, which may ask for the kind of a part or of a cell.

    Args:
        name: The file of the template.
        escape: What is done to all text; what is no Markup then, is escaped for HTML as well.
        filters: The template's own filters.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(value),
    )
    environment.filters |= {"json": lambda value: json.dumps(value, allow_nan=False)} | filters
    environment.tests |= {kind.__name__.lower(): lambda value, kind=kind: isinstance(value, kind) for kind in _KINDS}
    return environment.get_template(name)
