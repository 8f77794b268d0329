"""The chart of a model that grows until strategies run out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.report.charts import bar_marks, marks
from harness.report.charts.curves import Scale, curves
from harness.report.charts.lines import (
    ChartLine,
    Datum,
    chart_lines,
    range_text,
    select,
    value_table,
)
from harness.report.charts.series import Series, by_parameters
from harness.report.charts.style import alt
from harness.report.document import Chart, Table
from harness.report.text import Unit, byte_unit, bytes_text, format_numbers, join_words, pluralize
from harness.report.view import View

_MILLION = 1e6


def memory_wall(view: View) -> Chart | None:
    """Draw peak memory over the model's parameters, the limit, and where strategies ran out of memory."""
    series = by_parameters(chart_lines(view))
    if not series:
        return None
    drawn = select(series)
    points = [(curve, line) for curve in drawn for line in curve.points]
    unit = byte_unit([line.peak for _, line in points])
    measured = [curve.datum(x=_millions(line), y=line.peak / unit.size) for curve, line in points if line.peak]
    failed = [
        curve.datum(x=_millions(line), y=limit / unit.size, shown="out of memory")
        for curve, line in points
        if not line.ok and (limit := line.number("memory_limit_bytes"))
    ]
    text = (
        f"Peak memory of {pluralize(len(drawn), 'configuration')} in {unit.name} over millions of parameters,"
        f" {range_text([(point['label'], point['y']) for point in measured])};"
        f" {len([line for _, line in points if not line.ok])} ran out of memory."
    )
    limits = [
        {"strategy": "", "y": limit / unit.size, "shown": f"memory limit {bytes_text(limit)}"}
        for limit in _limits(drawn)
    ]
    columns = {
        "run": [curve.name for curve, _ in points],
        "status": [line.status for _, line in points],
        "parameters (millions)": [f"{_millions(line):,.3f}" for _, line in points],
        f"peak memory ({unit.name})": format_numbers([line.peak for _, line in points], unit),
    }
    table = value_table([curve.strategy for curve, _ in points], columns, 2)
    return _wall(view, text, series, measured, failed, limits, unit, table)


def largest_model(view: View) -> Chart | None:
    """Draw the largest model that each configuration trained, the largest first, if some ran out of memory."""
    if not any(line.status == "oom" for line in view.lines):
        return None
    series = by_parameters(chart_lines(view))
    if not any(line.status == "oom" for curve in series for line in curve.points):
        return None
    sizes = {curve.name: _largest(curve) for curve in series}
    ordered = [
        replace(curve, position=rank)
        for rank, curve in enumerate(sorted(series, key=lambda curve: -sizes[curve.name][0]))
    ]
    sizes = {curve.name: sizes[curve.name] for curve in ordered}
    title = "parameters of the largest model that ran (millions)"
    values = [
        curve.datum(value=size, total=size, shown=f"{size:,.2f}" + (f" (not {failed:,.2f})" if failed else ""))
        for curve, (size, failed) in zip(ordered, sizes.values(), strict=True)
    ]
    limits = sorted({bytes_text(limit) for limit in _limits(series)})
    within = f" within {join_words(limits)} per rank" if limits else ""
    text = (
        f"The largest model that {pluralize(len(ordered), 'configuration')} trained{within}, in millions of parameters:"
        f" {range_text([(name, size) for name, (size, _) in sizes.items()])}."
    )
    bar = bar_marks.bar_layer(values).mark_bar()
    tooltip = marks.tooltips(("value:Q", "parameters, millions", ",.3f"))
    x = bar_marks.from_zero("value", title)
    layers = [
        bar.encode(x=x, y=bar_marks.label_axis(), color=marks.strategy_color(view), tooltip=tooltip),
        bar_marks.numbers(values, title),
    ]
    name = f"Largest model that fits{within}"
    columns = {
        "run": list(sizes),
        "largest that ran (millions of parameters)": [f"{size:,.3f}" for size, _ in sizes.values()],
        "smallest that did not fit": [f"{failed:,.3f}" if failed else "" for _, failed in sizes.values()],
    }
    strategies, measure = [curve.strategy for curve in ordered], "largest that ran (millions of parameters)"
    return bar_marks.bar_chart(view, "largest", name, text, strategies, layers, columns, measure, margin=_ROOM)


_LIMIT = "memory_limit_bytes"

_ROOM = 150  # pixels behind the longest bar for the size that did not fit


def _largest(curve: Series) -> tuple[float, float | None]:
    """Return the largest size that ran and the smallest that ran out of memory, in millions of parameters."""
    ran = [_millions(line) for line in curve.points if line.ok]
    failed = [_millions(line) for line in curve.points if not line.ok]
    return max(ran, default=0.0), min(failed, default=None)


def _limits(curves: Sequence[Series]) -> list[float]:
    """Return the memory limits, which belong to no strategy and are never hidden."""
    return sorted({limit for curve in curves for line in curve.points if (limit := line.number(_LIMIT))})


def _millions(line: ChartLine) -> float:
    return (line.number("parameters") or 0.0) / _MILLION


def _wall(
    view: View,
    text: str,
    series: Sequence[Series],
    measured: Sequence[Datum],
    failed: Sequence[Datum],
    limits: Sequence[Datum],
    unit: Unit,
    table: Table,
) -> Chart:
    """Return the curves, the limits and the crosses where memory ran out."""
    across = sorted({datum["x"] for datum in (*measured, *failed)})
    highest = max(datum["y"] for datum in (*measured, *failed, *limits))
    margin = 0.03 * (across[-1] - across[0])
    scales = (
        Scale("parameters (millions)", (across[0] - margin, across[-1] + margin)),
        Scale(f"peak memory ({unit.name})", (0.0, 1.1 * highest)),
    )
    x, y = scales[0].channel("x", "x"), scales[1].channel("y", "y")
    parameters = ("x:Q", "parameters, millions", ",.3f")
    tooltip = marks.tooltips(parameters, ("y:Q", f"peak memory, {unit.name}", ",.4~f"))
    ended = marks.tooltips(parameters, ("shown:N", "status", ""))
    above = [
        (limits, lambda layer: layer.mark_rule(style="limit").encode(y=y)),
        (
            limits,
            lambda layer: layer.mark_text(style="value", align="left", baseline="bottom", dy=-3).encode(
                x=alt.value(4), y=y, text="shown:N"
            ),
        ),
        (
            failed,
            lambda layer: layer.mark_text(text="×", fontSize=18).encode(
                x=x,
                y=y,
                tooltip=ended,
                color=marks.strategy_color(view),
            ),
        ),
    ]
    name = "Peak memory by model size (×: out of memory)"
    return curves(view, "wall", name, text, series, measured, scales, tooltip, table, 3, above=above)
