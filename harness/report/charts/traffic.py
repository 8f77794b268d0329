"""The chart of the bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.report.charts import marks, style
from harness.report.charts.lines import (
    ChartLine,
    Datum,
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
from harness.report.text import Unit, byte_unit, format_numbers, pluralize
from harness.report.view import View
from harness.util.text import sanitize


class _Entry(NamedTuple):
    """The bytes that a line's rank sends along one mesh axis in a step, and the formula's."""

    line: ChartLine
    axis: str
    sent: float
    formula: float | None


def traffic(view: View) -> Chart | None:
    """Draw the bytes that the rank that sends most sends along each mesh axis, and those of the formula."""
    lines = [line for line in chart_lines(view) if line.ok and _entries(line)]
    if not lines:
        return None
    drawn = select(lines)
    entries = [entry for line in drawn for entry in _entries(line)]
    axes = list(dict.fromkeys(entry.axis for entry in entries))
    unit = byte_unit([size for entry in entries for size in (entry.sent, entry.formula)])
    ends = [(f"{entry.line.label} on {entry.axis}", entry.sent / unit.size) for entry in entries]
    alt_text = (
        f"Bytes that a rank of {pluralize(len(drawn), 'configuration')} sends per step by mesh axis ({', '.join(axes)})"
        f" in {unit.name}, compared with the layout's formula: {range_text(ends)}."
        f"{omitted_text(len(drawn), len(lines))}"
    )
    sent = format_numbers([entry.sent for entry in entries], unit)
    formulas = format_numbers([entry.formula for entry in entries], unit)
    rows = [(entry.line.label, entry.axis, *texts) for entry, *texts in zip(entries, sent, formulas, strict=True)]
    header = ["run", "mesh axis", f"sent ({unit.name})", f"formula ({unit.name})"]
    table = value_table(header, rows, [entry.line.strategy for entry in entries], 2)
    layers = _layers(_bars(entries, sent, len(axes) > 1, unit), axes, unit)
    return Chart("traffic", "Bytes sent by mesh axis", alt_text, marks.bars(layers, alt_text, len(entries)), table)


def _entries(line: ChartLine) -> list[_Entry]:
    return [
        _Entry(line, sanitize(entry.get("axis") or ""), sent, finite_number(entry.get("formula_bytes")))
        for entry in median_record(line).traffic
        if (sent := finite_number(entry.get("bytes"))) is not None
    ]


def _bars(entries: Sequence[_Entry], texts: Sequence[str], by_axis: bool, unit: Unit) -> list[Datum]:
    """Return the data of a bar for each entry, named by its axis too if there are several axes."""
    return [
        entry.line.datum(
            bar=f"{entry.line.label} · {entry.axis}" if by_axis else entry.line.label,
            rank=rank,
            axis=entry.axis,
            value=entry.sent / unit.size,
            sent=entry.sent,
            formula=entry.formula / unit.size if entry.formula is not None else None,
            exact=entry.formula,
            total=max(entry.sent, entry.formula or 0) / unit.size,
            shown=text,
        )
        for rank, (entry, text) in enumerate(zip(entries, texts, strict=True))
    ]


def _layers(bars: Sequence[Datum], axes: Sequence[str], unit: Unit) -> list[alt.Chart]:
    """Return the layers of the bars, of the formula's ticks and of the figures."""
    title = f"sent per step ({unit.name}; | = formula)"
    y = alt.Y("bar:N", title=None, sort=alt.EncodingSortField("rank", op="min"), axis=alt.Axis(grid=False))
    tooltip = marks.tooltips(
        ("axis:N", "mesh axis", ""), ("sent:Q", "sent, bytes", ",d"), ("exact:Q", "formula, bytes", ",d")
    )
    scale = alt.Scale(domain=list(axes), range=style.colors(len(axes)))
    legend = alt.Legend(orient="top", title="mesh axis") if len(axes) > 1 else None
    color = alt.Color("axis:N", scale=scale, legend=legend)
    return [
        marks.filterable_layer(bars)
        .mark_bar()
        .encode(x=marks.from_zero("value", title), y=y, tooltip=tooltip, color=color),
        marks.filterable_layer([bar for bar in bars if bar["formula"] is not None])
        .mark_tick(style="formula", thickness=3, size=style.step(len(bars)) - 4)
        .encode(x=marks.from_zero("formula", title), y=y, tooltip=tooltip),
        marks.filterable_layer(bars)
        .mark_text(align="left", dx=6, style="value")
        .encode(x=marks.from_zero("total", title), y=y, text="shown:N", tooltip=tooltip),
    ]
