"""The layers that charts share: bars by line, labelled points and curves.

All data are values in the spec, and all fields have fixed names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.charts import label_placement, style
from harness.report.charts.lines import ChartLine, Datum, failure_marks, padded_domain
from harness.report.charts.style import alt
from harness.report.document import VegaLite

_HIDDEN = "indexof(hidden, datum.strategy) < 0"

_MARGIN = 48  # pixels at the right of bars for their values


def filterable_layer(values: Sequence[Datum]) -> alt.Chart:
    """Return a layer of these data without those of hidden strategies."""
    return static_layer(values).transform_filter(_HIDDEN)


def static_layer(values: Sequence[Datum]) -> alt.Chart:
    """Return a layer of these data, whatever is hidden."""
    return alt.Chart(alt.InlineData(values=list(values)))


def spec(
    layers: Sequence[alt.Chart], alt_text: str, height: int | alt.Step = style.HEIGHT, margin: int = 0
) -> VegaLite:
    """Return the chart of these layers as Vega-Lite without a config.

    Args:
        layers: The layers, from the back to the front.
        alt_text: What the chart shows.
        height: The height of the plot in pixels, or of each bar.
        margin: Pixels at the right for text beyond the plot.
    """
    chart = alt.layer(*layers).properties(
        width=style.WIDTH,
        height=height,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        padding={"left": 4, "top": 4, "right": 4 + margin, "bottom": 4},
        description=alt_text,
        usermeta={"fluid": True},
    )
    vega_lite: VegaLite = chart.add_params(alt.param("hidden", value=[])).to_dict()
    del vega_lite["config"]
    return vega_lite


def bars(layers: Sequence[alt.Chart], alt_text: str, count: int) -> VegaLite:
    """Return a chart of `count` horizontal bars of the same height."""
    return spec(layers, alt_text, alt.Step(style.step(count)), _MARGIN)


def label_axis() -> alt.Y:
    """Return the vertical axis with the lines of the report from the top."""
    return alt.Y("label:N", title=None, sort=alt.EncodingSortField("position", op="min"), axis=alt.Axis(grid=False))


def from_zero(field: str, title: str) -> alt.X:
    """Return a horizontal axis of numbers that starts at 0."""
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(zero=True))


def tooltips(*named: tuple[str, str, str]) -> list[alt.Tooltip]:
    """Return tooltips of (field with its type, title, format); an empty format is for text."""
    return [
        alt.Tooltip(field, title=title, format=form) if form else alt.Tooltip(field, title=title)
        for field, title, form in (("label:N", "run", ""), *named)
    ]


def stacked(
    values: Sequence[Datum], title: str, exact: tuple[str, str, str], names: Sequence[str], margin: int = 0
) -> alt.Chart:
    """Return stacked bars.

    Args:
        values: The data of the parts.
        title: The title of the axis.
        exact: Field, title and format of the tooltip.
        names: The names of the parts in the order of their stack.
        margin: Pixels between the bars and the legend.
    """
    present = {datum["part"] for datum in values}
    shown = {name: color for name, color in zip(names, style.PALETTE, strict=False) if name in present}
    chart: alt.Chart = (
        filterable_layer(values)
        .mark_bar()
        .encode(
            x=alt.X("value:Q", title=title, stack="zero", scale=alt.Scale(zero=True)),
            y=label_axis(),
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=list(shown), range=list(shown.values())),
                legend=alt.Legend(orient="top", symbolType="square", columns=3, offset=8 + margin),
            ),
            order=alt.Order("rank:Q"),
            tooltip=tooltips(("part:N", "part", ""), exact),
        )
    )
    return chart


def numbers(values: Sequence[Datum], title: str) -> alt.Chart:
    """Return the figures behind the bars: the text `shown` at the position `total`."""
    text = filterable_layer(values).mark_text(align="left", dx=5, style="value")
    tooltip = tooltips(("shown:N", title, ""))
    chart: alt.Chart = text.encode(x=from_zero("total", title), y=label_axis(), text="shown:N", tooltip=tooltip)
    return chart


def failures(lines: Sequence[ChartLine], title: str) -> list[alt.Chart]:
    """Return the texts that replace the bars of lines that are not ok."""
    values = failure_marks(lines)
    if not values:
        return []
    return [
        filterable_layer(values)
        .mark_text(align="left", dx=5, style="ended")
        .encode(
            x=from_zero("zero", title),
            y=label_axis(),
            text="ended:N",
            tooltip=tooltips(("ended:N", "status", ""), ("reason:N", "reason", "")),
        )
    ]


def spanning(field: str, title: str, values: Sequence[float], padding: float = 0.1) -> Any:
    """Return an axis of points that covers these values with some margin and may start above 0."""
    return (alt.X if field == "x" else alt.Y)(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(domain=list(padded_domain(values, padding)), nice=False, zero=False),
    )


def labels(
    values: Sequence[Datum], x: alt.X, y: alt.Y, lines: Sequence[Sequence[Datum]] = (), legend: int = 0
) -> list[alt.Chart]:
    """Return the labels beside the points where there is space; points with `first` take precedence.

    Args:
        values: The data of the points.
        x: The horizontal axis, made by `spanning`.
        y: The vertical axis, made by `spanning`.
        lines: The corners of lines that labels must not cover.
        legend: The width of a legend in pixels.
    """
    horizontal: Any = x.to_dict()
    vertical: Any = y.to_dict()
    (left, right), (bottom, top) = horizontal["scale"]["domain"], vertical["scale"]["domain"]

    def relative(datum: Datum) -> label_placement.Point:
        return (datum["x"] - left) / (right - left), (top - datum["y"]) / (top - bottom)

    texts, first = [d["label"] for d in values], [bool(d.get("first")) for d in values]
    chosen = label_placement.place_labels(
        [relative(d) for d in values], texts, first, [[relative(d) for d in line] for line in lines], legend
    )
    sides: dict[str, list[Datum]] = {}
    for datum, side in zip(values, chosen, strict=True):
        sides.setdefault(side, []).append(datum | {"short": label_placement.shortened(datum["label"])})
    return [
        filterable_layer(sides[side])
        .mark_text(style="value", baseline="middle", align=align, dx=right, dy=down)
        .encode(x=x, y=y, text="short:N")
        for side, (align, right, down) in label_placement.SIDES.items()
        if side in sides
    ]


@dataclass(frozen=True)
class CurveChannels:
    """The channels that distinguish curves, with one legend."""

    color: alt.Color
    stroke: alt.Stroke  # the same color for marks that are not in the legend
    shape: alt.Shape  # of points
    stroke_dash: alt.StrokeDash


def by_label(names: Sequence[str], dashes: Sequence[Sequence[int]] = ()) -> CurveChannels:
    """Return channels with a color for each name and a shape for its points, or, if dashes are passed, its dashes."""
    points = {"symbolDash": [1, 0], "symbolOpacity": 1}
    symbols: dict[str, Any] = {"symbolType": "stroke", "symbolStrokeWidth": 3} if dashes else points
    legend = alt.Legend(orient="right", title=None, symbolSize=90, symbolLimit=0, **symbols)

    def scale(values: Sequence[Any]) -> alt.Scale:
        return alt.Scale(domain=list(names), range=list(values))

    colors = style.colors(len(names))
    return CurveChannels(
        color=alt.Color("label:N", legend=legend, scale=scale(colors)),
        stroke=alt.Stroke("label:N", legend=None, scale=scale(colors)),
        shape=alt.Shape("label:N", legend=legend, scale=scale(style.shapes(len(names)))),
        stroke_dash=alt.StrokeDash("label:N", legend=legend, scale=scale(dashes)),
    )


def curves(
    points: Sequence[Datum], x: alt.X, y: alt.Y, tooltip: Sequence[alt.Tooltip], channels: CurveChannels
) -> list[alt.Chart]:
    """Return a curve for each label through its points, which have the shapes of the legend."""
    return [
        filterable_layer(points).mark_line(strokeWidth=2).encode(x=x, y=y, color=channels.color),
        filterable_layer(points)
        .mark_point(filled=True, size=60, opacity=1)
        .encode(x=x, y=y, tooltip=list(tooltip), color=channels.color, shape=channels.shape),
    ]
