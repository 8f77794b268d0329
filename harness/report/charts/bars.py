"""Horizontal bars: a row for each configuration, its marks on a common axis, and texts behind them."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.report.charts import style
from harness.report.charts.marks import Plot, draw, palette, single
from harness.report.charts.rows import Field, Rows, scaled, tooltip, unseen
from harness.report.document import Chart, VegaLite
from harness.report.lines import Item, Line
from harness.report.text import Unit, format_numbers
from harness.report.view import View
from harness.util.text import sanitize

MOST = 60  # bars or curves of one chart that are drawn at once; the page draws the first of those that are visible

_RULE = "the first of those whose strategies are shown"

_MARGIN = 48  # pixels at the right of bars for their values

LINES = "split(datum.label, '\\n')"  # of the label of a bar


def labels(text: str = LINES) -> VegaLite:
    """Return an axis of the labels of bars, from the top, each as an expression says it."""
    axis = {
        "grid": False,
        "ticks": False,
        "domain": False,
        "labelExpr": text,
        "labelLineHeight": style.LINE,
        "labelOffset": {"expr": f"{-style.LINE / 2} * (length({LINES}) - 1)"},
    }
    return {"type": "nominal", "title": None, "sort": {"field": "position", "op": "min"}, "axis": axis}


class Bars(Plot):
    """Bars of rows. Behind each is the text `shown` at the field `total`, or `ended` where there is no bar."""

    @property
    def height(self) -> VegaLite:
        """The height of a plot: pixels for each bar."""
        lines = 1 + max(name.count("\n") for name in self.rows.fields["bar"].values)
        step = style.STEP if len(self.rows.items) <= style.MANY else style.NARROW_STEP
        return {"step": max(step, lines * style.LINE + 4)}

    def texts(self, total: str = "total", shown: str = "shown", ended: str = "ended") -> list[VegaLite]:
        """Return the layers of the texts."""
        behind = self.mark("text value", total, "bar", f"isValid(datum.{shown})", text=shown)
        return [behind, self.mark("text ended", {"value": 0}, "bar", f"isValid(datum.{ended})", text=ended)]

    def stack(self, names: Sequence[str], unit: Unit, *exact: tuple[str, str, str]) -> VegaLite:
        """Return the layer of bars that these fields make together, each in its own color in every chart.

        Args:
            names: The fields in the order of their stack.
            unit: The unit of their values.
            exact: Name, title and format in a tooltip of `value` or of `exact`, which is without a unit.
        """
        colors = {
            name: color
            for name, color in zip(names, style.PARTS, strict=False)
            if name in self.rows.fields and self.rows.known(name)
        }
        stacked = self.mark(
            "bar",
            "value",
            "bar",
            "datum.value != 0",
            color=palette("part", colors, {"orient": "top", "offset": 24}),
            order={"field": "rank", "type": "quantitative"},
            tooltip=tooltip(("label", "run", ""), ("part", "part", ""), *exact),
        )
        unfolded = [
            {"fold": list(colors), "as": ["part", "value"]},
            {"calculate": f"datum.value * {unit.size}", "as": "exact"},
            {"calculate": f"indexof({list(colors)}, datum.part)", "as": "rank"},
        ]
        return stacked | {"transform": [*unfolded, *stacked["transform"]]}

    def chart(
        self, name: str, title: str, measure: str, layers: Sequence[VegaLite], margin: int = _MARGIN, **more: Any
    ) -> Chart:
        """Return the chart of these layers, from the back to the front, and of the texts.

        The margin is in pixels, at the right of bars for their values. All else is as `draw` has it.
        """
        plot = single([*layers, *self.texts()], self.height)
        return draw(self.view, name, title, self.rows, measure, plot, right=margin, rule=_RULE, most=MOST, **more)


def bars(view: View, items: Sequence[Item], fields: Mapping[str, Field], scale: VegaLite, noun: str = "run") -> Bars:
    """Return bars under the labels of their items, or under the field `bar`."""
    names = fields["bar"].values if "bar" in fields else [item.label for item in items]
    lines = unseen([textwrap.fill(name, style.LONG, break_long_words=False, break_on_hyphens=False) for name in names])
    return Bars(view, Rows(items, {**fields, "bar": lines}, noun, names), scale, labels())


def row_fields(rows: Sequence[Mapping[str, float | None]], unit: Unit) -> dict[str, Field]:
    """Return the fields of parts and their sums, which have as many decimals as the largest of a row needs."""
    cells = zip(*(format_numbers(list(row.values()), unit) for row in rows), strict=True)
    return {
        name: Field(f"{name} ({unit.name})", [scaled(row[name], unit) for row in rows], texts)
        for name, texts in zip(rows[0], cells, strict=True)
    }


def endings(lines: Sequence[Line], is_timed: bool) -> dict[str, Field]:
    """Return the texts in place of the bars of lines that are not ok, and in a chart of times of untimed ones."""
    ended = [(is_timed and line.untimed and line.state) or (None if line.ok else line.end) for line in lines]
    reasons = [
        text and sanitize(line.row.get("noise_warning" if line.ok else "reason") or "")
        for line, text in zip(lines, ended, strict=True)
    ]
    return {"ended": Field("status", ended), "reason": Field("reason", reasons)}


def ordered(lines: Sequence[Line], key: Callable[[Line], float | None]) -> list[Line]:
    """Return the lines in ascending order, numbered from 0: those without a key come late, those that failed last."""
    keys = {line: key(line) for line in lines}
    ranked = sorted(lines, key=lambda line: (not line.ok, keys[line] is None, keys[line] or 0.0))
    return [replace(line, position=position) for position, line in enumerate(ranked)]
