"""The rows of a chart with their fields.

A field serves marks, tooltips, the table of exact values and the range that the alternative text states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from harness.report.document import Table, VegaLite
from harness.report.lines import Datum, Item
from harness.report.text import ONE, Unit, byte_unit, format_numbers, sentence


@dataclass(frozen=True)
class Field:
    """One quantity of all rows. A value that is None has no mark; a field without cells is not in the table."""

    title: str  # with its unit
    values: Sequence[Any]
    cells: Sequence[str] = ()
    form: str = ""  # of a number, by d3-format
    is_text: bool = False  # in the table


def numbers(title: str, values: Sequence[float | None], unit: Unit = ONE, form: str = ",.4~f") -> Field:
    """Return a field of numbers in a unit."""
    title = f"{title} ({unit.name})" if unit.name else title
    return Field(title, [scaled(value, unit) for value in values], format_numbers(values, unit), form)


def figures(title: str, values: Sequence[float | None], form: str) -> Field:
    """Return a field of numbers in one format; that of Python knows no ~, and shortens numbers without it."""
    return Field(
        title, values, ["" if value is None else format(value, form.replace("~", "")) for value in values], form
    )


def bytes_field(title: str, values: Sequence[float | None]) -> Field:
    """Return a field of bytes, in the unit that suits them."""
    return numbers(title, values, byte_unit(values))


def words(title: str, values: Sequence[str]) -> Field:
    """Return a field of texts, which marks and the table show."""
    return Field(title, values, values, is_text=True)


def column(title: str, cells: Sequence[str], is_text: bool = False) -> Field:
    """Return a field of the table alone."""
    return Field(title, [None] * len(cells), cells, is_text=is_text)


def unseen(values: Sequence[Any]) -> Field:
    """Return a field of marks alone."""
    return Field("", values)


def scaled(value: float | None, unit: Unit) -> float | None:
    """Return a value in a unit."""
    return None if value is None else value / unit.size


@dataclass(frozen=True)
class Rows:
    """The rows of a chart."""

    items: Sequence[Item]
    fields: Mapping[str, Field]
    noun: str = "run"  # what a row is called in the table
    names: Sequence[str] = ()  # of rows in the text, by default their labels

    @cached_property
    def data(self) -> list[Datum]:
        """The data of the marks."""
        return [
            item.datum(**{name: of.values[row] for name, of in self.fields.items() if of.values[row] is not None})
            for row, item in enumerate(self.items)
        ]

    @property
    def shown(self) -> dict[str, Field]:
        """The labels, and the fields with a title."""
        labels = words(self.noun, [item.label for item in self.items])
        return {"label": labels} | {name: field for name, field in self.fields.items() if field.title}

    @property
    def table(self) -> Table:
        """The exact values, without columns of numbers that are empty throughout."""
        fields = [field for field in self.shown.values() if field.is_text or any(field.cells)]
        cells = [list(row) for row in zip(*(field.cells for field in fields), strict=True)]
        header, texts = [field.title for field in fields], sum(field.is_text for field in fields)
        caption = sentence("simulated_rows", labels=self.simulated, total=len(self.items)) if self.simulated else ""
        return Table(header, cells, texts, caption, [item.strategy for item in self.items])

    @property
    def simulated(self) -> list[str]:
        """The labels of the rows that were simulated."""
        return [item.label for item in self.items if item.is_simulated]

    @property
    def tooltip(self) -> list[VegaLite]:
        """What is shown of a mark: the fields that some mark has."""
        known = {name for datum in self.data for name in datum}
        return tooltip(*((name, field.title, field.form) for name, field in self.shown.items() if name in known))

    def known(self, name: str) -> list[tuple[float, str, str]]:
        """Return value, cell and name of the rows that have a field."""
        names = self.names or [item.label for item in self.items]
        rows = zip(self.fields[name].values, self.fields[name].cells, names, strict=True)
        return [row for row in rows if row[0] is not None]

    def span(self, name: str) -> str:
        """Return the smallest and the largest value of a field with their labels, or the one that all have."""
        known = self.known(name)
        (low, least, lowest), (high, most, highest) = (end(known, key=itemgetter(0)) for end in (min, max))
        if least == most and f"{low:.4g}" != f"{high:.4g}":  # small ones in a table with the decimals of its largest
            least, most = f"{low:.4g}", f"{high:.4g}"
        if len(known) == 1:
            return f"{least} ({lowest})"
        return f"{least} for all" if least == most else f"from {least} ({lowest}) to {most} ({highest})"

    def count(self, name: str) -> int:
        """Return how many configurations have a field: rows of the same label are of one."""
        return len({datum["label"] for datum in self.data if name in datum})


def tooltip(*fields: tuple[str, str, str]) -> list[VegaLite]:
    """Return a tooltip of fields with their titles and formats, which texts do not have."""
    return [
        {"field": name, "title": title} | ({"type": "quantitative", "format": form} if form else {})
        for name, title, form in fields
    ]
