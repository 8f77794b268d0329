"""The layers that charts share, and whole charts of them: labelled points, axes, colors and tooltips.

All data are values in the spec, and all fields have fixed names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.report.charts import label_placement, style
from harness.report.charts.lines import MOST, Datum, padded_domain
from harness.report.charts.setting import setting_lines
from harness.report.charts.style import alt
from harness.report.document import VegaLite
from harness.report.view import View
from harness.util.text import sanitize

HIDDEN = "indexof(hidden, datum.strategy) < 0"

PLOT = (style.WIDTH - 70.0, float(style.HEIGHT))  # pixels of a plot that is alone in its chart

_WIDER = 0.8  # pixels by which a character is wider in other fonts than in those of FONT

_LEFT = 20  # pixels at the left, so that labels are whole where the reader's fonts are wider than those of FONT


def filterable_layer(values: Sequence[Datum]) -> alt.Chart:
    """Return a layer of these data without those of hidden strategies."""
    return static_layer(values).transform_filter(HIDDEN)


def static_layer(values: Sequence[Datum]) -> alt.Chart:
    """Return a layer of these data, whatever is hidden."""
    return alt.Chart(alt.InlineData(values=tuple(values)))


def spec(
    view: View,
    title: str,
    layers: Sequence[alt.Chart],
    alt_text: str,
    height: int | alt.Step = style.HEIGHT,
    margin: int = 0,
) -> VegaLite:
    """Return the chart of these layers as Vega-Lite without a config.

    Args:
        view: The runs, whose setting stands under the title.
        title: The title of the picture.
        layers: The layers, from the back to the front.
        alt_text: What the chart shows.
        height: The height of the plot in pixels, or of each bar.
        margin: Pixels at the right for text beyond the plot.
    """
    chart = alt.layer(*layers).properties(
        width=style.WIDTH,
        height=height,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        usermeta={"fluid": True},
    )
    return finish(view, title, chart, alt_text, margin)


def finish(
    view: View,
    title: str,
    chart: Any,
    alt_text: str,
    margin: int = 0,
    most: int = MOST,
    is_narrow: bool = False,
) -> VegaLite:
    """Return a chart as Vega-Lite without a config, with its title, its setting and the parameters of the page.

    Args:
        view: The runs, whose setting stands under the title.
        title: The title of the picture.
        chart: A layered chart, or several beside each other.
        alt_text: What the chart shows.
        margin: Pixels at the right for text beyond the plot.
        most: How many bars are drawn at once.
        is_narrow: Whether long labels of bars have two lines at any width.
    """
    chart = chart.properties(
        title=alt.TitleParams(text=title, subtitle=setting_lines(view)),
        padding={"left": _LEFT, "top": 4, "right": 4 + margin, "bottom": 4},
        description=alt_text,
    )
    values = {"hidden": [], "last": most - 1, "narrow": is_narrow, "tiny": False}
    parameters = [alt.param(name, value=value) for name, value in values.items()]
    vega_lite: VegaLite = chart.add_params(*parameters).to_dict()
    del vega_lite["config"]
    vega_lite["padding"]["left"] = max(_LEFT, round(_WIDER * _longest_label(vega_lite)))
    return vega_lite


def _longest_label(vega_lite: VegaLite) -> int:
    """Return the characters of the longest label of a bar, 0 for a chart without bars."""
    plots = [vega_lite, *vega_lite.get("concat", [])]
    if not any(isinstance(plot.get("height"), dict) for plot in plots):
        return 0
    data = (datum for values in vega_lite["datasets"].values() for datum in values)
    return max((len(datum.get("bar") or datum.get("label") or "") for datum in data), default=0)


def panels(chart: Any, columns: int, beside: int, narrow: tuple[int, int]) -> Any:
    """Return a concatenation with what the page needs to fit it to its width.

    Args:
        chart: Plots of equal width beside each other.
        columns: How many plots a row has.
        beside: The pixels of a row that are not plots.
        narrow: The same two numbers for narrow screens.
    """
    return chart.properties(
        usermeta={"panels": {"columns": columns, "beside": beside, "narrow": list(narrow)}}, autosize="pad"
    )


def strategy_color(view: View) -> alt.Color:
    """Return the channel by which every chart of a report colors a strategy alike."""
    colors = style.strategy_colors(sanitize(line.row.get("strategy") or "") for line in view.lines)
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    return alt.Color("strategy:N", scale=scale, legend=None)


def tooltips(*named: tuple[str, str, str]) -> list[alt.Tooltip]:
    """Return tooltips of (field with its type, title, format); an empty format is for text."""
    return [
        alt.Tooltip(field, title=title, format=form) if form else alt.Tooltip(field, title=title)
        for field, title, form in (("label:N", "run", ""), *named)
    ]


def spanning(field: str, title: str, values: Sequence[float], padding: float = 0.1) -> Any:
    """Return an axis of points that covers these values with some margin and may start above 0."""
    return (alt.X if field == "x" else alt.Y)(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(domain=list(padded_domain(values, padding)), nice=False, zero=False),
    )


def abbreviated(label: str) -> str:
    """Return the expression of a label that is shorter in a picture as narrow as a phone."""
    return f"(tiny ? replace({label}, ' checkpointing', ' ckpt') : {label})"


def labels(
    values: Sequence[Datum],
    x: alt.X,
    y: alt.Y,
    lines: Sequence[Sequence[Datum]] = (),
    size: tuple[float, float] = PLOT,
) -> list[alt.Chart]:
    """Return the labels beside the points where there is space; points with `first` take precedence.

    Args:
        values: The data of the points; a point with `name` has that as its label.
        x: The horizontal axis, made by `spanning`.
        y: The vertical axis, made by `spanning`.
        lines: The corners of lines that labels must not cover.
        size: Width and height of the plot in pixels.
    """
    horizontal: Any = x.to_dict()
    vertical: Any = y.to_dict()
    (left, right), (bottom, top) = horizontal["scale"]["domain"], vertical["scale"]["domain"]

    def relative(datum: Datum) -> label_placement.Point:
        return (datum["x"] - left) / (right - left), (top - datum["y"]) / (top - bottom)

    texts, first = [str(d.get("name", d["label"])) for d in values], [bool(d.get("first")) for d in values]
    chosen = label_placement.place_labels(
        [relative(d) for d in values], texts, first, [[relative(d) for d in line] for line in lines], size
    )
    sides: dict[str, list[Datum]] = {}
    for datum, text, side in zip(values, texts, chosen, strict=True):
        sides.setdefault(side, []).append(datum | {"short": label_placement.shortened(text)})
    return [
        filterable_layer(sides[side])
        .transform_calculate(shown=abbreviated("datum.short"))
        .mark_text(style="value", baseline="middle", align=align, dx=right, dy=down)
        .encode(x=x, y=y, text="shown:N")
        for side, (align, right, down) in label_placement.SIDES.items()
        if side in sides
    ]
