"""The layers and axes of charts of horizontal bars, one for each line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.report.charts import marks, style
from harness.report.charts.lines import MOST, ChartLine, Datum, end_text, omitted_text, value_table
from harness.report.charts.style import alt
from harness.report.document import Chart, VegaLite
from harness.report.speeds import CROWDED
from harness.report.view import View
from harness.util.text import sanitize

_MARGIN = 48  # pixels at the right of bars for their values

DISTURBED = "disturbed: not comparable"


def bar_layer(values: Sequence[Datum]) -> alt.Chart:
    """Return a layer of the data of bars: those of the first MOST bars whose strategies are not hidden."""
    return marks.static_layer(values).transform_filter(f"datum.position <= last && {marks.HIDDEN}")


def bar_chart(
    view: View,
    name: str,
    title: str,
    text: str,
    strategies: Sequence[str],
    layers: Sequence[alt.Chart],
    columns: Mapping[str, Sequence[str]],
    measure: str,
    label_columns: int = 1,
    margin: int = _MARGIN,
    noun: str = "configurations",
) -> Chart:
    """Return a chart of horizontal bars of the same height.

    Args:
        view: The runs of the report.
        name: The name of the chart's file.
        title: The title of the chart.
        text: What the chart shows; it is followed by how many bars are drawn, if not all are.
        strategies: That of each bar, from the top.
        layers: The marks, from the back to the front.
        columns: The table of the exact values, a row for each bar.
        measure: The column whose range the page states.
        label_columns: How many of the first columns are text.
        margin: Pixels at the right of bars for their values.
        noun: What a bar stands for.
    """
    drawn, total = min(MOST, len(strategies)), len(strategies)
    alt_text = text + omitted_text(drawn, total, noun=noun)
    vega_lite = marks.spec(view, title, layers, alt_text, alt.Step(style.step(drawn)), margin)
    table = value_table(strategies, columns, label_columns)
    return Chart(name, title, alt_text, with_order(vega_lite, strategies), table, table.header.index(measure))


def with_order(vega_lite: VegaLite, strategies: Sequence[str], most: int = MOST) -> VegaLite:
    """Return a chart with the strategies of all its bars, of which the page draws the first visible ones."""
    if len(strategies) <= most:
        return vega_lite
    return vega_lite | {"usermeta": vega_lite["usermeta"] | {"order": list(strategies), "most": most}}


def ordered(lines: Sequence[ChartLine], key: Callable[[ChartLine], float | None]) -> list[ChartLine]:
    """Return the lines in ascending order, numbered from 0: those without a key come late, those that failed last."""

    def rank(line: ChartLine) -> tuple[bool, bool, float]:
        value = key(line)
        return not line.ok, value is None, value or 0.0

    return [replace(line, position=position) for position, line in enumerate(sorted(lines, key=rank))]


def label_axis(labels: bool = True, field: str = "label") -> alt.Y:
    """Return the vertical axis with the bars of a chart from the top; in a narrow chart long labels have two lines."""
    label = marks.abbreviated("datum.label")
    text = label
    for separator in (" on ", " + "):
        at = f"indexof({label}, '{separator}')"
        text = f"{at} > 0 ? [slice({label}, 0, {at}), slice({label}, {at} + 1)] : {text}"
    is_split = f"narrow && length(datum.label) > {style.LONG}"
    axis = alt.Axis(
        grid=False,
        ticks=labels,
        domain=labels,
        labels=labels,
        labelExpr=f"{is_split} ? ({text}) : {label}",
        labelLineHeight=style.FONT_SIZE + 1,
        labelOffset=alt.ExprRef(f"{is_split} ? {-(style.FONT_SIZE + 1) / 2} : 0"),
    )
    return alt.Y(f"{field}:N", title=None, sort=alt.EncodingSortField("position", op="min"), axis=axis)


def label_lines(label: str) -> list[str]:
    """Return the one or two lines of a label, as the axis splits it."""
    separator = next((separator for separator in (" + ", " on ") if separator in label), "")
    if len(label) <= style.LONG or not separator:
        return [label]
    at = label.index(separator)
    return [label[:at], label[at + 1 :]]


def from_zero(field: str, title: str, ticks: int | None = None) -> alt.X:
    """Return a horizontal axis of numbers that starts at 0, with about so many ticks."""
    axis: dict[str, Any] = {"axis": alt.Axis(tickCount=ticks)} if ticks else {}
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(zero=True), **axis)


def stacked(
    values: Sequence[Datum], title: str, exact: Sequence[tuple[str, str, str]], names: Sequence[str], margin: int = 0
) -> alt.Chart:
    """Return stacked bars.

    Args:
        values: The data of the parts.
        title: The title of the axis.
        exact: Field, title and format of each tooltip.
        names: The names of the parts in the order of their stack; each has its color in every chart.
        margin: Pixels between the bars and the legend.
    """
    present = {datum["part"] for datum in values}
    longest = max((len(datum["label"]) for datum in values), default=0)
    columns = next((count for most, count in ((style.LONG, 3), (44, 2)) if longest <= most), 1)
    shown = {name: color for name, color in zip(names, style.PALETTE, strict=False) if name in present}
    chart: alt.Chart = (
        bar_layer(values)
        .mark_bar()
        .encode(
            x=alt.X("value:Q", title=title, stack="zero", scale=alt.Scale(zero=True)),
            y=label_axis(),
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=list(shown), range=list(shown.values())),
                legend=alt.Legend(
                    orient="top", symbolType="square", columns=columns, columnPadding=24, offset=8 + margin
                ),
            ),
            order=alt.Order("rank:Q"),
            tooltip=marks.tooltips(("part:N", "part", ""), *exact),
        )
    )
    return chart


def numbers(values: Sequence[Datum], title: str, labels: bool = True) -> alt.Chart:
    """Return the figures behind the bars: the text `shown` at the position `total`."""
    text = bar_layer(values).mark_text(align="left", dx=5, style="value")
    tooltip = marks.tooltips(("shown:N", title, ""))
    chart: alt.Chart = text.encode(x=from_zero("total", title), y=label_axis(labels), text="shown:N", tooltip=tooltip)
    return chart


def notes(lines: Sequence[ChartLine], title: str, is_timed: bool, labels: bool = True) -> list[alt.Chart]:
    """Return the texts that replace the bars of lines that are not ok, and in a chart of times of untimed ones."""
    values = [
        line.datum(
            zero=0,
            ended=untimed_reason(line) if line.ok else end_text(line),
            reason=sanitize(line.row.get("noise_warning" if line.ok else "reason") or ""),
        )
        for line in lines
        if not line.ok or (is_timed and not line.is_timed)
    ]
    if not values:
        return []
    return [
        bar_layer(values)
        .mark_text(align="left", dx=5, style="ended")
        .encode(
            x=from_zero("zero", title),
            y=label_axis(labels),
            text="ended:N",
            tooltip=marks.tooltips(("ended:N", "status", ""), ("reason:N", "reason", "")),
        )
    ]


def untimed_reason(line: ChartLine) -> str:
    """Return why the times of a line that is ok are not drawn; empty where they are."""
    return DISTURBED if line.is_disturbed else f"{CROWDED}: not comparable" if line.is_crowded else ""


def state(line: ChartLine) -> str:
    """Return why the times of a line that is ok are not drawn, else its status."""
    return (line.ok and untimed_reason(line)) or line.status
