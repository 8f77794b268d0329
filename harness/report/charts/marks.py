"""What charts share: bars by line, labelled points, curves; all data as values, all fields of fixed names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.report.charts import label_placement, style
from harness.report.charts.lines import ChartLine, Datum, failure_marks, padded_domain
from harness.report.charts.style import alt

_HIDDEN = "indexof(hidden, datum.strategy) < 0"

_ROOM = 48  # pixels to the right of bars for their values


def filterable_layer(values: Sequence[Datum]) -> alt.Chart:
    """A layer of these data without those of hidden strategies."""
    return static_layer(values).transform_filter(_HIDDEN)


def static_layer(values: Sequence[Datum]) -> alt.Chart:
    """A layer of these data, whatever is hidden."""
    return alt.Chart(alt.InlineData(values=list(values)))


def spec(
    layers: Sequence[alt.Chart], said: str, height: int | alt.Step = style.HEIGHT, room: int = 0
) -> dict[str, Any]:
    """The chart of these layers as Vega-Lite without a config. room: pixels at the right for text beyond the plot."""
    chart = alt.layer(*layers).properties(
        width=style.WIDTH,
        height=height,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        padding={"left": 4, "top": 4, "right": 4 + room, "bottom": 4},
        description=said,
        usermeta={"fluid": True},
    )
    found: dict[str, Any] = chart.add_params(alt.param("hidden", value=[])).to_dict()
    del found["config"]
    return found


def bars(layers: Sequence[alt.Chart], said: str, count: int) -> dict[str, Any]:
    """A chart of so many horizontal bars, each as high as every other."""
    return spec(layers, said, alt.Step(style.step(count)), _ROOM)


def label_axis() -> alt.Y:
    """The lines of the report from the top."""
    return alt.Y("label:N", title=None, sort=alt.EncodingSortField("place", op="min"), axis=alt.Axis(grid=False))


def from_zero(field: str, title: str) -> alt.X:
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(zero=True))


def tooltips(*named: tuple[str, str, str]) -> list[alt.Tooltip]:
    """(field with its type, title, format); an empty format is for text."""
    return [
        alt.Tooltip(field, title=title, format=form) if form else alt.Tooltip(field, title=title)
        for field, title, form in (("label:N", "run", ""), *named)
    ]


def stacked(
    values: Sequence[Datum], title: str, exact: tuple[str, str, str], names: Sequence[str], room: int = 0
) -> alt.Chart:
    """Bars of parts.

    exact: field, title and format of the tooltip; names: of the parts, in the order of their stack; room: pixels
    between bars and legend.
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
                legend=alt.Legend(orient="top", symbolType="square", columns=3, offset=8 + room),
            ),
            order=alt.Order("rank:Q"),
            tooltip=tooltips(("part:N", "part", ""), exact),
        )
    )
    return chart


def numbers(values: Sequence[Datum], title: str) -> alt.Chart:
    """Of every bar its length in figures: the field `total` and the text `shown`."""
    text = filterable_layer(values).mark_text(align="left", dx=5, style="value")
    tooltip = tooltips(("shown:N", title, ""))
    chart: alt.Chart = text.encode(x=from_zero("total", title), y=label_axis(), text="shown:N", tooltip=tooltip)
    return chart


def ends(lines: Sequence[ChartLine], title: str) -> list[alt.Chart]:
    """In the place of the bars of lines that are not ok, what became of them."""
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
            tooltip=tooltips(("ended:N", "ended", ""), ("reason:N", "reason", "")),
        )
    ]


def spanning(field: str, title: str, values: Sequence[float], around: float = 0.1) -> Any:
    """An axis of points, over these values with some room; it need not start at 0."""
    return (alt.X if field == "x" else alt.Y)(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(domain=list(padded_domain(values, around)), nice=False, zero=False),
    )


def labels(
    values: Sequence[Datum], x: alt.X, y: alt.Y, lines: Sequence[Sequence[Datum]] = (), legend: int = 0
) -> list[alt.Chart]:
    """The labels of points beside them, where there is room; those with `first` before the others.

    x, y: as made by `spanning`. lines: the corners of those that labels leave free. legend: pixels it takes.
    """
    across: Any = x.to_dict()
    up: Any = y.to_dict()
    (left, right), (bottom, top) = across["scale"]["domain"], up["scale"]["domain"]

    def at(datum: Datum) -> label_placement.Point:
        return (datum["x"] - left) / (right - left), (top - datum["y"]) / (top - bottom)

    texts, first = [d["label"] for d in values], [bool(d.get("first")) for d in values]
    places = label_placement.placed(
        [at(d) for d in values], texts, first, [[at(d) for d in line] for line in lines], legend
    )
    sides: dict[str, list[Datum]] = {}
    for datum, side in zip(values, places, strict=True):
        sides.setdefault(side, []).append(datum | {"short": label_placement.shortened(datum["label"])})
    drawn: dict[str, dict[str, Any]] = {
        place: {"align": align, "dx": across, "dy": down}
        for place, (align, across, down) in label_placement.PLACES.items()
    }
    return [
        filterable_layer(sides[side])
        .mark_text(style="value", baseline="middle", **how)
        .encode(x=x, y=y, text="short:N")
        for side, how in drawn.items()
        if side in sides
    ]


def by_label(names: Sequence[str], dashes: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
    """What tells curves apart, as one legend in their order: color with the shape of their points, or with dashes.

    `stroke` is the same color of what stands in no legend.
    """
    points = {"symbolDash": [1, 0], "symbolOpacity": 1}
    kind: dict[str, Any] = {"symbolType": "stroke", "symbolStrokeWidth": 3} if dashes else points
    legend = alt.Legend(orient="right", title=None, symbolSize=90, symbolLimit=0, **kind)
    channels: dict[str, tuple[Any, Any, Any]] = {
        "color": (alt.Color, style.colors(len(names)), legend),
        "stroke": (alt.Stroke, style.colors(len(names)), None),
        "shape": (alt.Shape, style.shapes(len(names)), legend),
        "strokeDash": (alt.StrokeDash, list(dashes), legend),
    }
    return {
        name: channel("label:N", legend=shown, scale=alt.Scale(domain=list(names), range=looks))
        for name, (channel, looks, shown) in channels.items()
    }


def curves(
    points: Sequence[Datum], x: alt.X, y: alt.Y, tooltip: Sequence[alt.Tooltip], looks: dict[str, Any]
) -> list[alt.Chart]:
    """A line a label through its points, which have the shapes of the legend."""
    return [
        filterable_layer(points).mark_line(strokeWidth=2).encode(x=x, y=y, color=looks["color"]),
        filterable_layer(points)
        .mark_point(filled=True, size=60, opacity=1)
        .encode(x=x, y=y, tooltip=list(tooltip), color=looks["color"], shape=looks["shape"]),
    ]
