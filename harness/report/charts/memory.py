"""Charts of memory: the parts of the peak, the predicted peak, and activations over the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.charts import bar_marks, marks
from harness.report.charts.curves import Scale, curves
from harness.report.charts.lines import (
    ChartLine,
    Datum,
    chart_lines,
    failure_text,
    padded_domain,
    part_data,
    range_text,
    select,
    value_table,
)
from harness.report.charts.series import by_micro_batch
from harness.report.charts.style import alt
from harness.report.comparability import is_measured
from harness.report.document import Chart
from harness.report.labels import PEAK_TITLES
from harness.report.text import Unit, byte_unit, bytes_text, format_numbers, pluralize
from harness.report.view import View, peak_run

_UNDIVIDED = "no breakdown recorded"

_AT_PEAK = {f"at_peak_{part}_bytes": name for part, name in PEAK_TITLES.items()}

_FARTHEST = 4.0  # times the highest peak: a limit beyond is mentioned and not drawn, as bars would be too short


def peak(view: View) -> Chart | None:
    """Draw the parts of the peak memory of every line, the smallest peak first, and the device's limit."""
    lines = bar_marks.ordered(chart_lines(view), lambda line: line.peak)
    peaks = {line.label: line.peak for line in lines if line.ok}
    known_peaks = [value for value in peaks.values() if value]
    if not known_peaks:
        return None
    unit = byte_unit(known_peaks)
    segments = [datum for line in lines if line.ok for datum in _segments(line, unit.size)]
    names = [name for name in (*_AT_PEAK.values(), _UNDIVIDED) if any(d["part"] == name for d in segments)]
    limits = sorted({limit for line in lines if (limit := line.number("memory_limit_bytes"))})
    near = [limit for limit in limits if limit <= _FARTHEST * max(known_peaks)]
    text = (
        f"Peak memory of {pluralize(len(known_peaks), 'configuration')} in {unit.name}, stacked by its use: "
        + range_text([(label, value / unit.size) for label, value in peaks.items() if value])
        + f".{_limit_text(limits, near)}{failure_text(lines)}"
    )
    title = f"peak memory ({unit.name})"
    shown = dict(zip(peaks, format_numbers(list(peaks.values()), unit), strict=True))
    totals = [
        line.datum(total=_beside(value, near, 0.18 * max(known_peaks)) / unit.size, shown=shown[line.label])
        for line in lines
        if (value := peaks.get(line.label))
    ]
    tooltip = [("value:Q", unit.name, ",.4~f"), ("exact:Q", "bytes", ",d")]
    layers = [
        bar_marks.stacked(segments, title, tooltip, (*_AT_PEAK.values(), _UNDIVIDED), 16 if near else 0),
        bar_marks.numbers(totals, title),
        *bar_marks.notes(lines, title, is_timed=False),
        *_rules(near, unit, title),
    ]
    strategies, columns = [line.strategy for line in lines], _peak_columns(lines, names, unit)
    return bar_marks.bar_chart(view, "peak", "Breakdown of peak memory", text, strategies, layers, columns, title, 2)


def _beside(value: float, limits: Sequence[float], margin: float) -> float:
    """Return where a bar's figure begins: at its end, or at the limit that would cross it."""
    return next((limit for limit in limits if value <= limit < value + margin), value)


def _segments(line: ChartLine, size: float) -> list[Datum]:
    """Return the parts of a peak, or the whole peak if they are not known."""
    row = peak_run(line.record).row
    parts = part_data(line, row, _AT_PEAK, size)
    whole = part_data(line, row, {"peak_allocated_bytes": _UNDIVIDED}, size)
    return parts or whole


def _rules(limits: Sequence[float], unit: Unit, title: str) -> list[alt.Chart]:
    """Return the layers of the device's limit, which belongs to no line and is never hidden."""
    if not limits:
        return []
    values = [
        {"strategy": "", "limit": limit / unit.size, "shown": f"memory limit {bytes_text(limit)}"} for limit in limits
    ]
    x = bar_marks.from_zero("limit", title)
    tooltip = [alt.Tooltip("shown:N", title="device")]
    return [
        marks.static_layer(values).mark_rule(style="limit").encode(x=x, tooltip=tooltip),
        marks.static_layer(values)
        .mark_text(style="value", align="right", baseline="bottom", dx=2, dy=-3)
        .encode(x=x, y=alt.value(0), text="shown:N"),
    ]


def _limit_text(limits: Sequence[float], near: Sequence[float]) -> str:
    if not limits:
        return ""
    beyond = "" if near else ", beyond the axis"
    return f" The device's memory limit is {' or '.join(bytes_text(limit) for limit in limits)}{beyond}."


def _peak_columns(lines: Sequence[ChartLine], names: Sequence[str], unit: Unit) -> dict[str, Sequence[str]]:
    rows = []
    for line in lines:
        parts = {d["part"]: d["exact"] for d in _segments(line, unit.size)} if line.ok else {}
        sizes = [*(parts.get(name) for name in names), line.peak, line.number("memory_limit_bytes")]
        rows.append(format_numbers(sizes, unit))
    titles = [f"{name} ({unit.name})" for name in (*names, "peak memory", "memory limit")]
    columns = dict(zip(titles, zip(*rows, strict=True), strict=True))
    return {"run": [line.label for line in lines], "status": [line.status for line in lines], **columns}


def predicted(view: View) -> Chart | None:
    """Draw the predicted peak against the measured one; on the diagonal they are equal."""
    pairs = [
        (line, planned, measured)
        for line in chart_lines(view)
        if is_measured(line.row) and (planned := line.number("predicted_peak_bytes")) and (measured := line.peak)
    ]
    if not pairs:
        return None
    unit = byte_unit([size for _, *sizes in pairs for size in sizes])
    errors = [(line.label, 100 * (planned / measured - 1)) for line, planned, measured in pairs]
    alt_text = (
        f"Predicted against measured peak memory of {pluralize(len(pairs), 'configuration')} in {unit.name};"
        f" relative error of the prediction in %: {range_text(errors, '+.2f')}."
    )
    farthest = {
        label
        for label, error in sorted(errors, key=lambda error: abs(error[1]))[-_MOST_LABELS:]
        if abs(error) >= _LEAST_ERROR
    }
    points = [
        line.datum(
            x=planned / unit.size, y=measured / unit.size, error=error, name=line.label if label in farthest else ""
        )
        for (line, planned, measured), (label, error) in zip(pairs, errors, strict=True)
    ]
    domain = padded_domain([point[axis] for point in points for axis in ("x", "y")])
    scale = alt.Scale(domain=list(domain), nice=False, zero=False)
    x = alt.X("x:Q", title=f"predicted peak memory ({unit.name})", scale=scale)
    y = alt.Y("y:Q", title=f"measured peak memory ({unit.name})", scale=scale)
    tooltip = marks.tooltips(
        ("x:Q", f"predicted, {unit.name}", ",.4~f"),
        ("y:Q", f"measured, {unit.name}", ",.4~f"),
        ("error:Q", "error, %", "+.2f"),
    )
    ends = [{"strategy": "", "x": end, "y": end} for end in domain]
    layers = [
        marks.static_layer(ends).mark_line(style="reference").encode(x=x, y=y),
        marks.filterable_layer(points)
        .mark_point(filled=True, size=70, opacity=0.9)
        .encode(x=x, y=y, tooltip=tooltip, color=marks.strategy_color(view)),
        *marks.labels(points, x, y, [ends]),
    ]
    columns = {
        "run": [line.label for line, *_ in pairs],
        f"predicted peak memory ({unit.name})": format_numbers([planned for _, planned, _ in pairs], unit),
        f"measured peak memory ({unit.name})": format_numbers([measured for *_, measured in pairs], unit),
        "error (%)": [f"{error:+.2f}" for _, error in errors],
    }
    table = value_table([line.strategy for line, *_ in pairs], columns)
    name = "Predicted and measured peak memory"
    return Chart("predicted", name, alt_text, marks.spec(view, name, layers, alt_text), table, 3)


_MOST_LABELS, _LEAST_ERROR = 6, 1.0  # labels of a chart of predictions, of errors of at least so many percent


def batches(view: View) -> Chart | None:
    """Draw the measured and the predicted activation memory over the micro-batch."""
    series = by_micro_batch(chart_lines(view))
    if not series:
        return None
    drawn = select(series)
    pairs = [(curve, line) for curve in drawn for line in curve.points]
    sizes = [_activations(line) for _, line in pairs]
    unit = byte_unit([size for pair in sizes for size in pair])
    points, predictions = (
        [
            curve.datum(x=line.number("micro_batch"), y=measured / unit.size)
            for (curve, line), size in zip(pairs, sizes, strict=True)
            if (measured := size[place]) is not None
        ]
        for place in (0, 1)
    )
    ends = [
        (f"{curve.name} at micro-batch {line.row['micro_batch']}", (size[0] or 0) / unit.size)
        for (curve, line), size in zip(pairs, sizes, strict=True)
    ]
    text = (
        f"Activation memory of {pluralize(len(drawn), 'configuration')} in {unit.name} by micro-batch size,"
        f" {range_text(ends)}."
    )
    batch = sorted({datum["x"] for datum in points})
    highest = max(datum["y"] for datum in (*points, *predictions))
    scales = (
        Scale("micro-batch (sequences)", (0, batch[-1] * 1.03), values=batch, form="d"),
        Scale(f"activations ({unit.name})", (0, highest * 1.05)),
    )
    x, y = scales[0].channel("x", "x"), scales[1].channel("y", "y")
    tooltips = [
        marks.tooltips(("x:Q", "micro-batch", ",d"), ("y:Q", f"{kind}, {unit.name}", ",.4~f"))
        for kind in ("measured", "predicted")
    ]
    crosses = (
        predictions,
        lambda layer: layer.mark_text(text="×", style="predicted").encode(x=x, y=y, tooltip=tooltips[1]),
    )
    columns = {
        "run": [curve.name for curve, _ in pairs],
        "micro-batch size (sequences)": [str(line.row["micro_batch"]) for _, line in pairs],
        f"measured ({unit.name})": format_numbers([measured for measured, _ in sizes], unit),
        f"predicted ({unit.name})": format_numbers([predicted for _, predicted in sizes], unit),
    }
    table = value_table([curve.strategy for curve, _ in pairs], columns)
    name = "Activation memory by micro-batch size (×: predicted)"
    return curves(view, "batches", name, text, series, points, scales, tooltips[0], table, above=[crosses])


def _activations(line: ChartLine) -> tuple[float | None, float | None]:
    return line.number("activation_bytes"), line.number("predicted_activation_bytes")
