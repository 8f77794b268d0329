"""The chart of the bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.report.charts import bar_marks, marks, style
from harness.report.charts.lines import (
    ChartLine,
    Datum,
    chart_lines,
    finite_number,
    median_record,
    range_text,
)
from harness.report.charts.style import alt
from harness.report.comparability import EQUAL_BYTES
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
    """Draw the bytes that the rank that sends most sends along each mesh axis, the fewest first.

    There is no chart where all send the same. Ticks of the formula stand where the bytes differ from it.
    """
    known = [line for line in chart_lines(view) if line.ok and _entries(line)]
    lines = bar_marks.ordered(known, lambda line: sum(entry.sent for entry in _entries(line)))
    entries = [entry for line in lines for entry in _entries(line)]
    sent_bytes = [entry.sent for entry in entries]
    if not entries or max(sent_bytes) - min(sent_bytes) <= EQUAL_BYTES * max(sent_bytes):
        return None
    axes = list(dict.fromkeys(entry.axis for entry in entries))
    unit = byte_unit([size for entry in entries for size in (entry.sent, entry.formula)])
    ends = [(f"{entry.line.label} on {entry.axis}", entry.sent / unit.size) for entry in entries]
    differing = [entry for entry in entries if _differs(entry)]
    text = (
        f"Bytes that a rank of {pluralize(len(lines), 'configuration')} sends per step by mesh axis ({', '.join(axes)})"
        f" in {unit.name}: {range_text(ends)}. "
        + (
            "The ticks are the bytes of the layout's formula, where those that were sent differ."
            if differing
            else "All are those of the layout's formula."
        )
    )
    sent = format_numbers(sent_bytes, unit)
    columns = {
        "run": [entry.line.label for entry in entries],
        "mesh axis": [entry.axis for entry in entries],
        f"sent ({unit.name})": sent,
        f"formula ({unit.name})": format_numbers([entry.formula for entry in entries], unit),
    }
    title = f"sent per step ({unit.name}{'; | = formula' if differing else ''})"
    layers = _layers(view, _bars(entries, sent, len(axes) > 1, unit), title, unit)
    strategies = [entry.line.strategy for entry in entries]
    return bar_marks.bar_chart(
        view, "traffic", "Bytes sent by mesh axis", text, strategies, layers, columns, f"sent ({unit.name})", 2
    )


def _differs(entry: _Entry) -> bool:
    return entry.formula is not None and abs(entry.sent - entry.formula) > EQUAL_BYTES * entry.formula


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
            position=rank,
            bar=f"{entry.line.label} · {entry.axis}" if by_axis else entry.line.label,
            axis=entry.axis,
            value=entry.sent / unit.size,
            formula=entry.formula / unit.size if entry.formula is not None else None,
            differs=_differs(entry),
            total=max(entry.sent, entry.formula or 0) / unit.size,
            shown=text,
        )
        for rank, (entry, text) in enumerate(zip(entries, texts, strict=True))
    ]


def _layers(view: View, bars: Sequence[Datum], title: str, unit: Unit) -> list[alt.Chart]:
    """Return the layers of the bars, of the formula's ticks and of the figures."""
    y = bar_marks.label_axis(field="bar")
    tooltip = marks.tooltips(
        ("axis:N", "mesh axis", ""),
        ("value:Q", f"sent, {unit.name}", ",.4~f"),
        ("formula:Q", f"formula, {unit.name}", ",.4~f"),
    )
    color = marks.strategy_color(view)
    differing = [bar for bar in bars if bar["differs"]]
    ticks = bar_marks.bar_layer(differing).mark_tick(style="formula", thickness=3, size=style.step(len(bars)) - 4)
    return [
        bar_marks.bar_layer(bars)
        .mark_bar()
        .encode(x=bar_marks.from_zero("value", title), y=y, tooltip=tooltip, color=color),
        *([ticks.encode(x=bar_marks.from_zero("formula", title), y=y, tooltip=tooltip)] if differing else []),
        bar_marks.bar_layer(bars)
        .mark_text(align="left", dx=6, style="value")
        .encode(x=bar_marks.from_zero("total", title), y=y, text="shown:N", tooltip=tooltip),
    ]
