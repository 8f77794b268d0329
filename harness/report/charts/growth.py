"""The chart of a model that grows until strategies run out of memory."""

from harness.report.charts import marks
from harness.report.charts.lines import ChartLine, chart_lines, omitted_text, range_text, select, value_table
from harness.report.charts.series import by_parameters
from harness.report.charts.style import alt
from harness.report.document import Chart
from harness.report.text import byte_unit, bytes_text, format_numbers, pluralize
from harness.report.view import View

_MILLION = 1e6


def memory_wall(view: View) -> Chart | None:
    """Draw peak memory over the model's parameters, the limit, and where strategies ran out of memory."""
    curves = by_parameters(chart_lines(view))
    if not curves:
        return None
    drawn = select(curves)
    pairs = [(series, line) for series in drawn for line in series.points]
    limits = sorted({limit for _, line in pairs if (limit := line.number("memory_limit_bytes"))})
    unit = byte_unit([line.number("peak_allocated_bytes") for _, line in pairs if line.ok])

    def millions(line: ChartLine) -> float:
        return (line.number("parameters") or 0.0) / _MILLION

    measured = [
        series.datum(x=millions(line), y=peak / unit.size, exact=peak)
        for series, line in pairs
        if line.ok and (peak := line.number("peak_allocated_bytes"))
    ]
    failed = [
        series.datum(x=millions(line), y=limit / unit.size, shown="out of memory")
        for series, line in pairs
        if not line.ok and (limit := line.number("memory_limit_bytes"))
    ]
    alt_text = (
        f"Peak memory of {pluralize(len(drawn), 'line')} in {unit.name} over millions of parameters,"
        f" {range_text([(point['label'], point['y']) for point in measured])};"
        f" {len([line for _, line in pairs if not line.ok])} ran out of memory.{omitted_text(len(drawn), len(curves))}"
    )
    across = sorted({datum["x"] for datum in (*measured, *failed)})
    room = 0.03 * (across[-1] - across[0])
    x = alt.X(
        "x:Q",
        title="parameters of the model (millions)",
        scale=alt.Scale(zero=False, nice=False, domain=[across[0] - room, across[-1] + room]),
    )
    y = alt.Y("y:Q", title=f"peak memory ({unit.name}; × out of memory)", scale=alt.Scale(zero=True))
    tooltip = marks.tooltips(("x:Q", "parameters, millions", ",.3f"), ("exact:Q", "peak, bytes", ",d"))
    looks = marks.by_label([series.name for series in drawn])
    layers = marks.curves(measured, x, y, tooltip, looks)
    if limits:
        values = [{"strategy": "", "y": limit / unit.size, "shown": f"limit {bytes_text(limit)}"} for limit in limits]
        layers += [
            marks.static_layer(values).mark_rule(style="limit").encode(y=y),
            marks.static_layer(values)
            .mark_text(style="value", align="left", baseline="bottom", dy=-3)
            .encode(x=alt.value(4), y=y, text="shown:N"),
        ]
    if failed:
        tooltip_of_failed = marks.tooltips(("x:Q", "parameters, millions", ",.3f"), ("shown:N", "", ""))
        crosses = marks.filterable_layer(failed).mark_text(text="×", fontSize=18)
        layers.append(crosses.encode(x=x, y=y, tooltip=tooltip_of_failed, color=looks["color"]))
    peaks = format_numbers([line.number("peak_allocated_bytes") if line.ok else None for _, line in pairs], unit)
    rows = [
        (series.name, line.status, f"{millions(line):,.3f}", peak)
        for (series, line), peak in zip(pairs, peaks, strict=True)
    ]
    header = ["run", "status", "parameters (millions)", f"peak ({unit.name})"]
    table = value_table(header, rows, [series.strategy for series, _ in pairs], 2)
    return Chart("wall", "Peak memory against the model's size", alt_text, marks.spec(layers, alt_text), table)
