"""A report as data: sections of prose, tables and pictures. All text is plain: markdown.py and html.py escape it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from harness.report.frame import column_values


class Best(str):
    """A cell whose figure is the best of its column."""

    __slots__ = ()


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class BulletList:
    """A list; of each item what leads (may be empty) is set off from what is said of it."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table: the first `names` columns are text, the others numbers; a cell may be a Best."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    caption: str = ""
    strategies: Sequence[str] = ()  # of each row, where the page can hide rows by it


@dataclass(frozen=True)
class Chart:
    """A chart, with all that it shows said in words and in a table as well."""

    name: str  # of its file, without suffix; letters, digits and hyphens
    title: str
    alt_text: str  # a sentence for those who do not see it: what is drawn, and over which range
    spec: dict[str, Any]  # Vega-Lite; its data have a field `strategy`, by which the page hides marks
    table: Table  # the exact values


Part = Paragraph | BulletList | Table | Chart


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; `inner` are sections one level further in."""

    title: str
    parts: Sequence[Part]
    inner: Sequence["Section"] = field(default_factory=tuple)


def section(title: str, *parts: Part | None, inner: Sequence[Section] = ()) -> list[Section]:
    """The section, or nothing where nothing would stand in it."""
    known = [part for part in parts if part is not None]
    return [Section(title, known, inner)] if known or inner else []


def labelled(table: pd.DataFrame, columns: dict[str, list[str]], names: int = 1) -> Table:
    """A table with a row a run and the columns given; runs of which all of them are empty are left out."""
    rows = [cells for cells in zip(column_values(table, "label"), *columns.values(), strict=True) if any(cells[1:])]
    return Table(["run", *columns], rows, names)
