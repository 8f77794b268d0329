"""Horizontal bars: a row for each configuration, its marks on a common axis, and texts behind them."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.report.charts import marks, style
from harness.report.charts.marks import Field, Plot, Rows, Scale, unseen
from harness.report.charts.setting import setting_lines
from harness.report.document import Chart, VegaLite
from harness.report.lines import Datum, Item, Line
from harness.report.sentences import sentence
from harness.report.text import Unit, format_numbers
from harness.report.view import View
from harness.util.text import sanitize

MOST = 60  # bars or curves of one chart that are drawn at once; the page draws the first of those that are visible

_RULE = "the first of those whose strategies are shown"

_MARGIN = 48  # pixels at the right of bars for their values

LINES = "split(datum.label, '\\n')"  # of the label of a bar


@dataclass(frozen=True)
class Labels(Scale):
    """An axis of the labels of bars, from the top."""

    text: str = LINES  # the expression of a label

    def channel(self, field: str) -> VegaLite:
        """Return the channel of a field."""
        axis = {
            "grid": False,
            "ticks": False,
            "domain": False,
            "labelExpr": self.text,
            "labelLineHeight": style.LINE,
            "labelOffset": {"expr": f"{-style.LINE / 2} * (length({LINES}) - 1)"},
        }
        sort = {"field": "position", "op": "min"}
        return {"field": field, "type": "nominal", "title": None, "sort": sort, "axis": axis}


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
        known = [name for name in names if name in self.rows.fields and self.rows.known(name)]
        colors = {name: style.PALETTE[names.index(name)] for name in known}
        stacked = self.mark(
            "bar",
            "value",
            "bar",
            "datum.value != 0",
            color=marks.palette("part", colors, {"orient": "top", "offset": 24}),
            order={"field": "rank", "type": "quantitative"},
            tooltip=marks.tooltip(("label", "run", ""), ("part", "part", ""), *exact),
        )
        fold = {"fold": list(colors), "as": ["part", "value"]}
        values = {"exact": f"datum.value * {unit.size}", "rank": f"indexof({list(colors)}, datum.part)"}
        calculated = [{"calculate": expression, "as": name} for name, expression in values.items()]
        return stacked | {"transform": [fold, *calculated, *stacked["transform"]]}

    def chart(
        self,
        name: str,
        title: str,
        measure: str,
        layers: Sequence[VegaLite],
        margin: int = _MARGIN,
        data: Mapping[str, Sequence[Datum]] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Chart:
        """Return the chart of these layers and the texts, as `marks.draw` does.

        Args:
            name: The name of the chart's file.
            title: The title of the chart.
            measure: The field whose range the page states.
            layers: The marks, from the back to the front.
            margin: Pixels at the right of bars for their values.
            data: More data by their names.
            facts: What the sentence of this chart says beside what its rows show.
        """
        total = len(self.rows.items)
        noun = "configuration" if self.rows.noun == "run" else self.rows.noun
        omitted = sentence("chart_omitted", drawn=min(MOST, total), total=total, rule=_RULE, noun=noun)
        plot = marks.single([*layers, *self.texts()], self.height) | {"usermeta": self.order()}
        return marks.draw(
            name, title, setting_lines(self.view), self.rows, measure, plot, facts, data, margin, MOST, omitted
        )

    def order(self, most: int = MOST) -> VegaLite:
        """Return the strategies of all bars if not all are drawn at once: the page draws the first visible ones."""
        strategies = self.rows.strategies
        return {"order": strategies, "most": most} if len(strategies) > most else {}


def bars(view: View, items: Sequence[Item], fields: Mapping[str, Field], scale: Scale, noun: str = "run") -> Bars:
    """Return bars under the labels of their items, or under the field `bar`."""
    names = fields["bar"].values if "bar" in fields else [item.label for item in items]
    lines = unseen([textwrap.fill(name, style.LONG, break_long_words=False, break_on_hyphens=False) for name in names])
    return Bars(view, Rows(items, {**fields, "bar": lines}, noun, names), scale, Labels(""))


def row_fields(rows: Sequence[Mapping[str, float | None]], unit: Unit) -> dict[str, Field]:
    """Return the fields of parts and their sums, which have as many decimals as the largest of a row needs."""
    cells = [format_numbers(list(row.values()), unit) for row in rows]
    return {
        name: Field(
            f"{name} ({unit.name})", [marks.scaled(row[name], unit) for row in rows], [row[place] for row in cells]
        )
        for place, name in enumerate(rows[0])
    }


def endings(lines: Sequence[Line], is_timed: bool) -> dict[str, Field]:
    """Return the texts in place of the bars of lines that are not ok, and in a chart of times of untimed ones."""
    ended = [(is_timed and line.untimed and line.state) or (None if line.ok else line.end) for line in lines]
    reasons = [sanitize(line.row.get("noise_warning" if line.ok else "reason") or "") for line in lines]
    shown = [text and reason for text, reason in zip(ended, reasons, strict=True)]
    return {"ended": Field("status", ended), "reason": Field("reason", shown)}


def ordered(lines: Sequence[Line], key: Callable[[Line], float | None]) -> list[Line]:
    """Return the lines in ascending order, numbered from 0: those without a key come late, those that failed last."""

    def rank(line: Line) -> tuple[bool, bool, float]:
        value = key(line)
        return not line.ok, value is None, value or 0.0

    return [replace(line, position=position) for position, line in enumerate(sorted(lines, key=rank))]
