"""What a chart is declared by beside its rows: its axes and its layers of marks; and the chart made of them."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.charts import style
from harness.report.charts.rows import Rows
from harness.report.document import Chart, VegaLite
from harness.report.lines import Datum
from harness.report.text import sentence
from harness.report.view import View, setting

# What the page draws: marks of strategies that are not hidden, and of bars the first ones. Some marks have neither.
_VISIBLE = "indexof(hidden, datum.strategy) < 0 && !(datum.position > last)"

_TITLE = 38  # characters of a line of an axis's title, which fits the narrowest picture

_LINE = 98  # characters of a line under a chart's title

_NONE: Mapping[str, Any] = {}

_COLORED = ("", "hollow", "failed", "linear", "curve", "dashed")  # the styles of marks in the colors of strategies


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
