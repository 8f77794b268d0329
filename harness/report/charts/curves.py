"""Curves with their names at their ends, and where there are many, a small chart for each strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.charts import label_placement, marks, style
from harness.report.charts.lines import ONE_OF_EACH, Datum, omitted_text, select
from harness.report.charts.series import Series
from harness.report.charts.style import alt
from harness.report.comparability import group_by
from harness.report.document import Chart, Table
from harness.report.view import View

_FEW = 6  # curves that one chart can show

_COLUMNS, _CELL_HEIGHT, _CELL_AXIS = 2, 150, 56  # of small charts: beside each other, and pixels

_LETTER, _LINE = 6.2, 13  # pixels of a label's character and line


@dataclass(frozen=True)
class Scale:
    """One axis of curves, the same in all small charts."""

    title: str
    domain: tuple[float, float]
    is_log: bool = False
    values: Sequence[float] | None = None  # of the ticks; by default evenly spaced ones
    form: str = ""  # of the ticks' labels

    def channel(self, letter: str, field: str) -> Any:
        """Return the channel x or y of a field."""
        kind = {"type": "log"} if self.is_log else {"zero": False}
        axis: dict[str, Any] = {"format": self.form} if self.form else {}
        axis |= {"values": list(self.values)} if self.values is not None else {}
        scale = alt.Scale(domain=list(self.domain), nice=False, **kind)
        return (alt.X if letter == "x" else alt.Y)(f"{field}:Q", title=self.title, scale=scale, axis=alt.Axis(**axis))

    def share(self, value: float) -> float:
        """Return where a value lies between the ends of the axis, from 0 to 1."""
        low, high, at = (math.log(number) if self.is_log else number for number in (*self.domain, value))
        return (at - low) / (high - low)

    def at(self, share: float) -> float:
        """Return the value at a place between the ends of the axis."""
        low, high = (math.log(number) if self.is_log else number for number in self.domain)
        value = low + share * (high - low)
        return math.exp(value) if self.is_log else value


def curves(
    view: View,
    name: str,
    title: str,
    text: str,
    all_series: Sequence[Series],
    points: Sequence[Datum],
    scales: tuple[Scale, Scale],
    tooltip: Sequence[alt.Tooltip],
    table: Table,
    measure: int = 2,
    behind: Sequence[tuple[Sequence[Datum], Any]] = (),
    above: Sequence[tuple[Sequence[Datum], Any]] = (),
) -> Chart:
    """Return a chart of curves in the colors of their strategies, each named at its end.

    Args:
        view: The runs of the report.
        name: The name of the chart's file.
        title: The title of the chart.
        text: What the chart shows; it is followed by which curves are drawn, if not all are.
        all_series: The curves, of which those that `select` chooses are drawn.
        points: The data of their points: `label`, `x`, `y` and what the tooltip shows, in the order of x.
        scales: The horizontal and the vertical axis.
        tooltip: The tooltip of a point.
        table: The exact values.
        measure: The table's column whose range the page states.
        behind: Data and a function from a layer of them to its marks, behind the curves.
        above: The same, in front of the curves. Data of the strategy "" are drawn in every small chart.
    """
    series = select(all_series)
    alt_text = text + omitted_text(len(series), len(all_series), ONE_OF_EACH)
    groups = group_by(series, lambda curve: curve.strategy)
    variants = {curve.name: rank for group in groups.values() for rank, curve in enumerate(group)}
    ranks = sorted(set(variants.values()))
    points = [point | {"variant": variants[point["label"]]} for point in points]
    color = marks.strategy_color(view)

    def plot(strategies: set[str], names: dict[str, str], height: float) -> list[alt.Chart]:
        def own(data: Sequence[Datum]) -> list[Datum]:
            return [datum for datum in data if datum["strategy"] in strategies]

        layers = [draw(_layer(own(data))) for data, draw in behind if own(data)]
        layers += _curve_layers(own(points), scales, tooltip, color, ranks)
        layers += [draw(_layer(own(data))) for data, draw in above if own(data)]
        return [*layers, *_end_labels(own(points), names, scales, height)]

    if len(series) <= _FEW:
        names = {curve.name: label_placement.shortened(curve.name) for curve in series}
        layers = plot({*groups, ""}, names, style.HEIGHT)
        margin = round(_LETTER * max(map(len, names.values()))) + 4
        return Chart(name, title, alt_text, marks.spec(view, title, layers, alt_text, margin=margin), table, measure)
    names = {curve.name: _variant(curve) for curve in series}
    width = (style.WIDTH - _COLUMNS * (_CELL_AXIS + _room(names))) // _COLUMNS
    cells = [
        alt.layer(*plot({strategy, ""}, names, _CELL_HEIGHT)).properties(
            width=width, height=_CELL_HEIGHT, title=alt.TitleParams(strategy, fontSize=style.FONT_SIZE, offset=4)
        )
        for strategy in groups
    ]
    cell = _CELL_AXIS + _room(names)
    chart = marks.panels(alt.concat(*cells, columns=_COLUMNS), _COLUMNS, _COLUMNS * cell, (2, 2 * cell))
    return Chart(name, title, alt_text, marks.finish(view, title, chart, alt_text, _room(names)), table, measure)


def _variant(curve: Series) -> str:
    """Return what a curve is beside its strategy, such as "full" for full checkpointing."""
    return curve.name.removeprefix(curve.strategy).strip().removeprefix("+ ").replace(" checkpointing", "")


def _room(names: dict[str, str]) -> int:
    """Return the pixels that labels need at the right of a small chart."""
    return round(_LETTER * min(12, max(map(len, names.values()))))


def _layer(data: Sequence[Datum]) -> alt.Chart:
    """Return a layer of the data; those that belong to no strategy are never hidden."""
    is_static = all(not datum["strategy"] for datum in data)
    return (marks.static_layer if is_static else marks.filterable_layer)(data)


def _curve_layers(
    points: Sequence[Datum],
    scales: tuple[Scale, Scale],
    tooltip: Sequence[alt.Tooltip],
    color: alt.Color,
    ranks: Sequence[int],
) -> list[alt.Chart]:
    """Return the lines and points of curves; those of one strategy differ in their dashes and shapes by their rank."""
    x, y = scales[0].channel("x", "x"), scales[1].channel("y", "y")
    dash = alt.StrokeDash("variant:N", legend=None, scale=alt.Scale(domain=list(ranks), range=style.dashes(len(ranks))))
    shape = alt.Shape("variant:N", legend=None, scale=alt.Scale(domain=list(ranks), range=style.shapes(len(ranks))))
    lines = marks.filterable_layer(points).mark_line(strokeWidth=2)
    dots = marks.filterable_layer(points).mark_point(filled=True, size=50, opacity=1)
    return [
        lines.encode(x=x, y=y, color=color, strokeDash=dash, detail="label:N"),
        dots.encode(x=x, y=y, color=color, shape=shape, tooltip=list(tooltip)),
    ]


def _end_labels(
    points: Sequence[Datum], names: dict[str, str], scales: tuple[Scale, Scale], height: float
) -> list[alt.Chart]:
    """Return the names of the curves at the right of their last points, moved apart where they would overlap."""
    last = {point["label"]: point for point in points}
    ends = sorted((point for name, point in last.items() if names[name]), key=lambda point: -point["y"])
    if not ends:
        return []
    tops = [height * (1 - scales[1].share(point["y"])) for point in ends]
    placed: list[float] = []
    for top in tops:
        placed.append(max(top, placed[-1] + _LINE) if placed else top)
    overflow = max(0.0, (placed[-1] if placed else 0.0) - height)
    values = [
        point | {"end": scales[1].at(1 - (top - overflow) / height), "short": names[point["label"]]}
        for point, top in zip(ends, placed, strict=True)
    ]
    text = marks.filterable_layer(values).mark_text(style="value", align="left", dx=7)
    return [text.encode(x=scales[0].channel("x", "x"), y=scales[1].channel("y", "end"), text="short:N")]
