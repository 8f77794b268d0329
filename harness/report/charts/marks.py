"""What a chart is declared by: its rows with their fields, its axes, its layers of marks; and the chart made of them.

A field serves marks, tooltips, the table of exact values and the range that the alternative text states.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from harness.report.charts import style
from harness.report.document import Chart, Table, VegaLite
from harness.report.lines import Datum, Item
from harness.report.text import ONE, Unit, byte_unit, format_numbers, sentence
from harness.report.view import View, setting

# What the page draws: marks of strategies that are not hidden, and of bars the first ones. Some marks have neither.
_VISIBLE = "indexof(hidden, datum.strategy) < 0 && !(datum.position > last)"

_TITLE = 38  # characters of a line of an axis's title, which fits the narrowest picture

_LINE = 98  # characters of a line under a chart's title

_NONE: Mapping[str, Any] = {}

_COLORED = ("", "hollow", "failed", "linear", "curve", "dashed")  # the styles of marks in the colors of strategies


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


def axis(title: str, domain: tuple[float, float] | None = None, is_log: bool = False, **shown: Any) -> VegaLite:
    """Return an axis of numbers: the channel of every field on it, without the field.

    Args:
        title: The title.
        domain: The ends; by default from 0.
        is_log: Whether it is logarithmic.
        shown: How ticks are shown, as Vega-Lite has it.
    """
    scale = {"type": "log"} if is_log else {"zero": domain is None}
    return {
        "type": "quantitative",
        "title": textwrap.wrap(title, _TITLE),
        "scale": scale | ({"domain": list(domain), "nice": False} if domain else {}),
        "axis": shown,
    }


def spanning(title: str, values: Sequence[float]) -> VegaLite:
    """Return an axis that shows all values with some margin and does not start at 0."""
    low, high = min(values), max(values)
    margin = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
    return axis(title, (low - margin, high + margin))


def share(of: VegaLite, value: float) -> float:
    """Return where a value lies between the ends of an axis that has a domain, from 0 to 1."""
    low, high, at = (math.log(end) if "type" in of["scale"] else end for end in (*of["scale"]["domain"], value))
    return (at - low) / (high - low)


def palette(field: str, looks: Mapping[Any, Any], legend: VegaLite | None = None) -> VegaLite:
    """Return the channel of a field whose values have these looks, such as colors."""
    return {
        "field": field,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(looks), "range": list(looks.values())},
        "legend": legend,
    }


def _looks_simulated(color: VegaLite, is_filled: bool) -> VegaLite:
    """Return the channels by which marks of simulations have translucent areas and dashed outlines."""

    def where(simulated: Any, otherwise: Any) -> VegaLite:
        return {"condition": {"test": "datum.simulated", **simulated}, "value": otherwise}

    fill = {"fillOpacity": where({"value": 0.5}, 1), "stroke": where(color | {"legend": None}, None)}
    return (fill if is_filled else {}) | {"strokeDash": where({"value": [3, 2]}, [1, 0]), "strokeWidth": {"value": 1.5}}


@dataclass(frozen=True)
class Plot:
    """Rows on two axes, of which the marks of a chart are made."""

    view: View
    rows: Rows
    x: VegaLite
    y: VegaLite

    def mark(
        self,
        mark: str,
        x: str | VegaLite | None = "x",
        y: str | VegaLite | None = "y",
        test: str = "true",
        data: str = "",
        **channels: Any,
    ) -> VegaLite:
        """Return a layer of marks. Those without a style of their own have the colors of strategies.

        Args:
            mark: The type of the marks and their style, such as "rule spread".
            x: A field of all that have a mark, or a constant; None where marks reach over the whole axis.
            y: The same of the other axis.
            test: An expression that is true of what has a mark.
            data: The name of the data, by default the rows, whose marks have tooltips.
            channels: More channels, which may be names of fields.
        """
        kind, _, look = mark.partition(" ")
        tests = [f"isValid(datum['{field}'])" for field in (x, y) if isinstance(field, str)]
        of: dict[str, Any] = {"x": x, "y": y}
        if look in _COLORED:
            of["color"] = palette("strategy", style.strategy_colors(line.strategy for line in self.view.lines))
        if kind != "line" and not data:
            of["tooltip"] = self.rows.tooltip
        if kind in ("bar", "point") and look in ("", "hollow") and self.rows.simulated:
            of |= _looks_simulated(channels.get("color") or of["color"], is_filled=not look)
        axes = {"x": self.x, "y": self.y}
        return {
            **({"data": {"name": data}} if data else {}),
            "mark": {"type": kind, "style": look or kind},
            "transform": [{"filter": " && ".join([_VISIBLE, *tests, test])}],
            "encoding": {
                name: {"field": channel} | axes.get(name, {}) if isinstance(channel, str) else channel
                for name, channel in (of | channels).items()
                if channel
            },
        }


def single(layers: Sequence[VegaLite], height: Any = style.HEIGHT) -> VegaLite:
    """Return one plot, which the page makes as wide as there is space."""
    return {
        "layer": list(layers),
        "width": style.WIDTH,
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
    }


def draw(
    view: View,
    name: str,
    title: str,
    rows: Rows,
    measure: str,
    plot: VegaLite,
    facts: Mapping[str, Any] = _NONE,
    data: Mapping[str, Sequence[Datum]] = _NONE,
    right: int = 0,
    rule: str = "",
    total: int = 0,
    most: int = 10**6,
    params: Mapping[str, Any] = _NONE,
    subtitle: Sequence[str] = (),
) -> Chart:
    """Return a chart, as Vega-Lite without a config.

    Args:
        view: What it is of.
        name: The name of the chart's file.
        title: The title of the chart.
        rows: The rows of the chart.
        measure: The field whose range the page states, "" for none.
        plot: One plot, or several.
        facts: What the sentence of this chart says beside what its rows show.
        data: More data by their names.
        right: Pixels at the right for text beyond the plot.
        rule: What is drawn where there is too much.
        total: How many configurations there are, if not all are among the rows.
        most: How many rows are drawn at once: the page draws the first visible ones.
        params: More parameters that the page may change.
        subtitle: The lines under the title, by default the setting of the runs.
    """
    table, among = rows.table, {item.label for item in rows.items} if total else rows.items
    noun = "configuration" if rows.noun == "run" else rows.noun
    omitted = sentence("chart_omitted", drawn=min(most, len(among)), total=total or len(among), rule=rule, noun=noun)
    text = sentence(f"{name.partition('-')[0]}_chart", rows=rows, **facts) + omitted
    text += sentence("simulated_marks") if rows.simulated else ""
    values = {"hidden": [], "last": most - 1, **params}
    order = {"order": table.strategies, "most": most} if len(rows.items) > most else {}
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": title, "subtitle": list(subtitle or textwrap.wrap(setting(view), _LINE))},
        "description": text,
        # Labels at the left are whole where the reader's fonts are wider than those of FONT.
        "padding": {"left": 20, "top": 4, "right": 4 + right, "bottom": 4},
        "params": [{"name": name, "value": value} for name, value in values.items()],
        "datasets": {"rows": rows.data, **data},
        "data": {"name": "rows"},
        **plot,
        "usermeta": plot.get("usermeta", {}) | order,
    }
    return Chart(name, title, text, spec, table, table.header.index(rows.fields[measure].title) if measure else 0)
