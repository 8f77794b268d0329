"""The chart of a model that grows until strategies run out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.charts import marks
from harness.report.charts.lines import ChartLine, Datum, chart_lines, omitted_text, range_text, select, value_table
from harness.report.charts.series import Series, by_parameters
from harness.report.charts.style import alt
from harness.report.document import Chart, Table
from harness.report.text import Unit, byte_unit, bytes_text, format_numbers, pluralize
from harness.report.view import View

_MILLION = 1e6

Points = Sequence[tuple[Series, ChartLine]]  # every line with the curve that it is a point of


def memory_wall(view: View) -> Chart | None:
    """Draw peak memory over the model's parameters, the limit, and where strategies ran out of memory."""
    curves = by_parameters(chart_lines(view))
    if not curves:
        return None
    drawn = select(curves)
    points = [(series, line) for series in drawn for line in series.points]
    unit = byte_unit([line.number("peak_allocated_bytes") for _, line in points if line.ok])
    measured = [
        series.datum(x=_millions(line), y=peak / unit.size, exact=peak)
        for series, line in points
        if line.ok and (peak := line.number("peak_allocated_bytes"))
    ]
    failed = [
        series.datum(x=_millions(line), y=limit / unit.size, shown="out of memory")
        for series, line in points
        if not line.ok and (limit := line.number("memory_limit_bytes"))
    ]
    alt_text = (
        f"Peak memory of {pluralize(len(drawn), 'configuration')} in {unit.name} over millions of parameters,"
        f" {range_text([(point['label'], point['y']) for point in measured])};"
        f" {len([line for _, line in points if not line.ok])} ran out of memory.{omitted_text(len(drawn), len(curves))}"
    )
    layers = _layers(measured, failed, [series.name for series in drawn], _limits(points, unit), unit)
    vega_lite = marks.spec(layers, alt_text)
    return Chart("wall", "Peak memory by model size", alt_text, vega_lite, _value_table(points, unit))


def _millions(line: ChartLine) -> float:
    return (line.number("parameters") or 0.0) / _MILLION


def _limits(points: Points, unit: Unit) -> list[Datum]:
    """Return the data of the memory limits, which belong to no strategy and are never hidden."""
    limits = sorted({limit for _, line in points if (limit := line.number("memory_limit_bytes"))})
    return [{"strategy": "", "y": limit / unit.size, "shown": f"memory limit {bytes_text(limit)}"} for limit in limits]


def _layers(
    measured: Sequence[Datum], failed: Sequence[Datum], names: Sequence[str], limits: Sequence[Datum], unit: Unit
) -> list[alt.Chart]:
    """Return the layers of the curves, of the limits and of the crosses where memory ran out."""
    across = sorted({datum["x"] for datum in (*measured, *failed)})
    margin = 0.03 * (across[-1] - across[0])
    x = alt.X(
        "x:Q",
        title="model parameters (millions)",
        scale=alt.Scale(zero=False, nice=False, domain=[across[0] - margin, across[-1] + margin]),
    )
    y = alt.Y("y:Q", title=f"peak memory ({unit.name}; × = out of memory)", scale=alt.Scale(zero=True))
    parameters = ("x:Q", "parameters, millions", ",.3f")
    channels = marks.by_label(names)
    layers = marks.curves(measured, x, y, marks.tooltips(parameters, ("exact:Q", "peak memory, bytes", ",d")), channels)
    if limits:
        layers += [
            marks.static_layer(limits).mark_rule(style="limit").encode(y=y),
            marks.static_layer(limits)
            .mark_text(style="value", align="left", baseline="bottom", dy=-3)
            .encode(x=alt.value(4), y=y, text="shown:N"),
        ]
    if failed:
        crosses = marks.filterable_layer(failed).mark_text(text="×", fontSize=18)
        tooltip = marks.tooltips(parameters, ("shown:N", "status", ""))
        layers.append(crosses.encode(x=x, y=y, tooltip=tooltip, color=channels.color))
    return layers


def _value_table(points: Points, unit: Unit) -> Table:
    peaks = format_numbers([line.number("peak_allocated_bytes") if line.ok else None for _, line in points], unit)
    rows = [
        (series.name, line.status, f"{_millions(line):,.3f}", peak)
        for (series, line), peak in zip(points, peaks, strict=True)
    ]
    header = ["run", "status", "parameters (millions)", f"peak memory ({unit.name})"]
    return value_table(header, rows, [series.strategy for series, _ in points], 2)
