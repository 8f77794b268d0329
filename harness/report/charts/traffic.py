"""The chart of the bytes that a rank sends."""

from harness.report.charts import marks, style
from harness.report.charts.lines import (
    ChartLine,
    chart_lines,
    finite_number,
    median_record,
    omitted_text,
    range_text,
    select,
    value_table,
)
from harness.report.charts.style import alt
from harness.report.document import Chart
from harness.report.text import byte_unit, format_numbers, pluralize
from harness.report.view import View
from harness.util.text import sanitize


def traffic(view: View) -> Chart | None:
    """Draw the bytes that the rank that sends most sends along each mesh axis, beside the formula's."""
    lines = [line for line in chart_lines(view) if line.ok and _entries(line)]
    if not lines:
        return None
    drawn = select(lines)
    entries = [(line, axis, sent, formula) for line in drawn for axis, sent, formula in _entries(line)]
    axes = list(dict.fromkeys(axis for _, axis, *_ in entries))
    unit = byte_unit([size for *_, sent, formula in entries for size in (sent, formula)])
    ends = [(f"{line.label} on {axis}", sent / unit.size) for line, axis, sent, _ in entries]
    alt_text = (
        f"Bytes a rank sends in a step of {pluralize(len(drawn), 'line')} by mesh axis ({', '.join(axes)})"
        f" in {unit.name},"
        f" beside the layout's formula: {range_text(ends)}."
        f"{omitted_text(len(drawn), len(lines))}"
    )
    shown = format_numbers([sent for _, _, sent, _ in entries], unit)
    bars = [
        line.datum(
            bar=f"{line.label} · {axis}" if len(axes) > 1 else line.label,
            rank=place,
            axis=axis,
            value=sent / unit.size,
            sent=sent,
            formula=formula / unit.size if formula is not None else None,
            exact=formula,
            total=max(sent, formula or 0) / unit.size,
            shown=text,
        )
        for place, ((line, axis, sent, formula), text) in enumerate(zip(entries, shown, strict=True))
    ]
    title = f"sent a step ({unit.name}; | by the formula)"
    y = alt.Y("bar:N", title=None, sort=alt.EncodingSortField("rank", op="min"), axis=alt.Axis(grid=False))
    tooltip = marks.tooltips(
        ("axis:N", "mesh axis", ""), ("sent:Q", "sent, bytes", ",d"), ("exact:Q", "formula, bytes", ",d")
    )
    scale = alt.Scale(domain=axes, range=style.colors(len(axes)))
    legend = alt.Legend(orient="top", title="mesh axis") if len(axes) > 1 else None
    layers = [
        marks.filterable_layer(bars)
        .mark_bar()
        .encode(
            x=marks.from_zero("value", title),
            y=y,
            tooltip=tooltip,
            color=alt.Color("axis:N", scale=scale, legend=legend),
        ),
        marks.filterable_layer([bar for bar in bars if bar["formula"] is not None])
        .mark_tick(style="formula", thickness=3, size=style.step(len(bars)) - 4)
        .encode(x=marks.from_zero("formula", title), y=y, tooltip=tooltip),
        marks.filterable_layer(bars)
        .mark_text(align="left", dx=6, style="value")
        .encode(x=marks.from_zero("total", title), y=y, text="shown:N", tooltip=tooltip),
    ]
    formulas = format_numbers([formula for *_, formula in entries], unit)
    rows = [
        (line.label, axis, *texts)
        for (line, axis, *_), texts in zip(entries, zip(shown, formulas, strict=True), strict=True)
    ]
    header = ["run", "mesh axis", f"sent ({unit.name})", f"formula ({unit.name})"]
    table = value_table(header, rows, [line.strategy for line, *_ in entries], 2)
    return Chart("traffic", "Bytes sent by mesh axis", alt_text, marks.bars(layers, alt_text, len(bars)), table)


def _entries(line: ChartLine) -> list[tuple[str, float, float | None]]:
    """Return axis, bytes sent and the formula's bytes of every entry."""
    return [
        (sanitize(entry.get("axis") or ""), sent, finite_number(entry.get("formula_bytes")))
        for entry in median_record(line).traffic
        if (sent := finite_number(entry.get("bytes"))) is not None
    ]
