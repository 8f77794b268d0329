"""What a chart is declared by: its rows with their fields, its axes, its layers of marks; and the chart made of them.

A field serves marks, tooltips, the table of exact values and the range that the alternative text states.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from harness.report.charts import style
from harness.report.document import Chart, Table, VegaLite
from harness.report.lines import Datum, Item
from harness.report.sentences import sentence
from harness.report.text import ONE, Unit, byte_unit, format_numbers
from harness.report.view import View
from harness.util.text import sanitize

# What the page draws: marks of strategies that are not hidden, and of bars the first ones. Some marks have neither.
_VISIBLE = "indexof(hidden, datum.strategy) < 0 && !(datum.position > last)"

_LEFT = 20  # pixels at the left, so that labels are whole where the reader's fonts are wider than those of FONT

_TITLE = 38  # characters of a line of an axis's title, which fits the narrowest picture


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

    @property
    def data(self) -> list[Datum]:
        """The data of the marks."""
        return [item.datum(**self._values(place)) for place, item in enumerate(self.items)]

    def _values(self, place: int) -> Datum:
        values = {name: field.values[place] for name, field in self.fields.items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def strategies(self) -> list[str]:
        """The strategy of each row."""
        return [item.strategy for item in self.items]

    @property
    def table(self) -> Table:
        """The exact values, without columns of numbers that are empty throughout."""
        fields = [field for field in self.fields.values() if field.is_text or (field.title and any(field.cells))]
        columns = [[item.label for item in self.items], *(field.cells for field in fields)]
        header = [self.noun, *(field.title for field in fields)]
        texts = 1 + sum(field.is_text for field in fields)
        return Table(header, list(map(list, zip(*columns, strict=True))), texts, strategies=self.strategies)

    @property
    def tooltip(self) -> list[VegaLite]:
        """The fields with a title that some mark has."""
        known = {name: field for name, field in self.fields.items() if any(value is not None for value in field.values)}
        fields = [(name, field.title, field.form) for name, field in known.items() if field.title]
        return tooltip(("label", self.noun, ""), *fields)

    def known(self, name: str) -> list[tuple[float, str, str]]:
        """Return value, cell and name of the rows that have a field."""
        field, names = self.fields[name], self.names or [item.label for item in self.items]
        known = zip(field.values, field.cells, names, strict=True)
        return [(value, cell, name) for value, cell, name in known if value is not None]

    def span(self, name: str) -> str:
        """Return the smallest and the largest value of a field with their labels, or the one that all have."""
        known = self.known(name)
        (low, least, lowest), (high, most, highest) = (end(known, key=itemgetter(0)) for end in (min, max))
        if len(known) == 1:
            return f"{least} ({lowest})"
        if least == most and f"{low:.4g}" == f"{high:.4g}":
            return f"{least} for all"
        if least == most:  # small figures of a table whose decimals are those of its largest
            least, most = f"{low:.4g}", f"{high:.4g}"
        return f"from {least} ({lowest}) to {most} ({highest})"

    def count(self, name: str) -> int:
        """Return how many configurations have a field: rows of the same label are of one."""
        known = zip(self.items, self.fields[name].values, strict=True)
        return len({item.label for item, value in known if value is not None})


def tooltip(*fields: tuple[str, str, str]) -> list[VegaLite]:
    """Return a tooltip of fields with their titles and formats, which texts do not have."""
    formats = [{"type": "quantitative", "format": form} if form else {} for *_, form in fields]
    return [{"field": name, "title": title} | form for (name, title, _), form in zip(fields, formats, strict=True)]


@dataclass(frozen=True)
class Scale:
    """An axis of numbers, which marks of several fields share."""

    title: str
    domain: tuple[float, float] | None = None  # by default from 0
    is_log: bool = False
    values: Sequence[float] | None = None  # of the ticks; by default evenly spaced ones
    form: str = ""  # of the ticks' labels

    def channel(self, field: str) -> VegaLite:
        """Return the channel of a field."""
        scale: dict[str, Any] = {"type": "log"} if self.is_log else {"zero": self.domain is None}
        scale |= {"domain": list(self.domain), "nice": False} if self.domain else {}
        axis: dict[str, Any] = {"format": self.form, "tickMinStep": 1} if self.form else {}
        axis |= {"values": list(self.values)} if self.values else {}
        title = textwrap.wrap(self.title, _TITLE)
        return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}

    def share(self, value: float) -> float:
        """Return where a value lies between the ends of the axis, from 0 to 1."""
        low, high, at = (math.log(number) if self.is_log else number for number in (*(self.domain or (0, 1)), value))
        return (at - low) / (high - low)


def spanning(title: str, values: Sequence[float]) -> Scale:
    """Return an axis that shows all values with some margin and does not start at 0."""
    low, high = min(values), max(values)
    margin = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(title, (low - margin, high + margin))


def palette(field: str, colors: Mapping[str, str], legend: VegaLite | None = None) -> VegaLite:
    """Return the channel of a field's colors."""
    scale = {"domain": list(colors), "range": list(colors.values())}
    return {"field": field, "title": None, "scale": scale, "legend": legend}


def strategy_color(view: View) -> VegaLite:
    """Return the channel by which every chart of a report colors a strategy alike."""
    return palette("strategy", style.strategy_colors(sanitize(line.row.get("strategy") or "") for line in view.lines))


def layer(mark: str, data: str = "", test: str = "true", **channels: Any) -> VegaLite:
    """Return a layer of marks.

    Args:
        mark: The type of the marks and their style, such as "rule spread".
        data: The name of the data, by default the rows of the chart.
        test: An expression that is true of what has a mark.
        channels: The channels, which may be names of fields.
    """
    kind, _, look = mark.partition(" ")
    encoding = {name: {"field": channel} if isinstance(channel, str) else channel for name, channel in channels.items()}
    own = {"data": {"name": data}} if data else {}
    filters = [{"filter": f"{_VISIBLE} && {test}"}]
    return own | {"mark": {"type": kind, "style": look or kind}, "transform": filters, "encoding": encoding}


@dataclass(frozen=True)
class Plot:
    """Rows on two axes, of which the marks of a chart are made."""

    view: View
    rows: Rows
    x: Scale
    y: Scale

    def mark(
        self, mark: str, x: str | VegaLite = "x", y: str | VegaLite = "y", test: str = "true", **channels: Any
    ) -> VegaLite:
        """Return the layer of marks of the rows that have both fields, or with a constant x or y.

        Marks without a style of their own have the colors of strategies.
        """
        tests = [f"isValid(datum['{field}'])" for field in (x, y) if isinstance(field, str)]
        places: dict[str, Any] = {
            name: scale.channel(field) if isinstance(field, str) else field
            for name, scale, field in (("x", self.x, x), ("y", self.y, y))
        }
        if mark.partition(" ")[2] in ("", "hollow", "failed", "linear", "curve"):
            places["color"] = strategy_color(self.view)
        if not mark.startswith("line"):
            places["tooltip"] = self.rows.tooltip
        return layer(mark, test=" && ".join([*tests, test]), **(places | channels))


def single(layers: Sequence[VegaLite], height: Any = style.HEIGHT) -> VegaLite:
    """Return one plot, which the page makes as wide as there is space."""
    size = {"width": style.WIDTH, "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {"layer": list(layers)} | size


def draw(
    name: str,
    title: str,
    subtitle: Sequence[str],
    rows: Rows,
    measure: str,
    plot: VegaLite,
    facts: Mapping[str, Any] | None = None,
    data: Mapping[str, Sequence[Datum]] | None = None,
    right: int = 0,
    most: int = 10**6,
    omitted: str = "",
) -> Chart:
    """Return a chart, as Vega-Lite without a config.

    Args:
        name: The name of the chart's file.
        title: The title of the chart.
        subtitle: The lines under the title, such as the setting of the runs.
        rows: The rows of the chart.
        measure: The field whose range the page states, "" for none.
        plot: One plot, or several.
        facts: What the sentence of this chart says beside what its rows show.
        data: More data by their names.
        right: Pixels at the right for text beyond the plot.
        most: How many bars are drawn at once.
        omitted: A sentence on what is not drawn.
    """
    text = sentence(f"{name.partition('-')[0]}_chart", rows=rows, **(facts or {})) + omitted
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": title, "subtitle": list(subtitle)},
        "description": text,
        "padding": {"left": _LEFT, "top": 4, "right": 4 + right, "bottom": 4},
        "params": [{"name": "hidden", "value": []}, {"name": "last", "value": most - 1}],
        "datasets": {"rows": rows.data} | dict(data or {}),
        "data": {"name": "rows"},
    }
    table = rows.table
    place = table.header.index(rows.fields[measure].title) if measure else 0
    return Chart(name, title, text, spec | plot, table, place)
