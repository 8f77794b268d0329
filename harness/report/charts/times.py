"""Charts of a step's time: its parts, and the communication that nothing hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.report.charts import bar_marks
from harness.report.charts.lines import (
    ChartLine,
    Datum,
    chart_lines,
    failure_text,
    median_record,
    part_data,
    range_text,
    untimed_text,
)
from harness.report.charts.style import alt
from harness.report.document import Chart
from harness.report.labels import STEP_TITLES
from harness.report.text import MILLISECONDS, format_numbers, pluralize
from harness.report.view import View


def step(view: View) -> Chart | None:
    """Draw the parts of the step time of every line's median repeat, the shortest step first."""
    lines = [line for line in chart_lines(view) if not line.ok or line.row.get("step_seconds") is not None]
    lines = [line for line in lines if not line.is_timed or _step_parts(line)] if view.draws_speeds else []
    parts = {line.label: _step_parts(line) for line in lines}
    totals = {label: sum(datum["exact"] for datum in data) for label, data in parts.items() if data}
    lines = bar_marks.ordered(lines, lambda line: totals.get(line.label))
    segments = [datum for line in lines for datum in _step_parts(line)]
    if not segments:
        return None
    names = [name for name in STEP_TITLES.values() if any(datum["part"] == name for datum in segments)]
    text = (
        f"Step time of {pluralize(len(totals), 'configuration')} in ms, stacked by its parts, {', '.join(names)}:"
        f" {range_text([(label, total / MILLISECONDS.size) for label, total in totals.items()])}."
        + (
            " Repeated runs are represented by the one with the median speed."
            if any(line.is_repeated for line in lines)
            else ""
        )
        + untimed_text(lines)
        + failure_text(lines)
    )
    columns: dict[str, Sequence[str]] = {"run": [line.label for line in lines]}
    columns["status"] = list(map(bar_marks.state, lines))
    rows = []
    for line in lines:
        seconds = {datum["part"]: datum["exact"] for datum in parts[line.label]}
        rows.append(format_numbers([*(seconds.get(name) for name in names), totals.get(line.label)], MILLISECONDS))
    titles = [*(f"{name} (ms)" for name in names), "step time (ms)"]
    columns |= dict(zip(titles, zip(*rows, strict=True), strict=True))
    layers = _layers(lines, segments, totals, titles[-1], STEP_TITLES, totals)
    strategies = [line.strategy for line in lines]
    return bar_marks.bar_chart(view, "step", "Breakdown of step time", text, strategies, layers, columns, titles[-1], 2)


def _step_parts(line: ChartLine) -> list[Datum]:
    if not line.is_timed:
        return []
    return part_data(line, median_record(line).row, STEP_TITLES, MILLISECONDS.size)


def _layers(
    lines: Sequence[ChartLine],
    segments: Sequence[Datum],
    totals: Mapping[str, float],
    title: str,
    parts: Mapping[str, str],
    figures: Mapping[str, float | None],
) -> list[alt.Chart]:
    """Return stacked bars of times in ms, with these figures behind them."""
    shown = dict(zip(figures, format_numbers(list(figures.values()), MILLISECONDS), strict=True))
    beside = [
        line.datum(total=totals[line.label] / MILLISECONDS.size, shown=shown[line.label])
        for line in lines
        if line.label in totals
    ]
    return [
        bar_marks.stacked(segments, title, [("value:Q", "ms", ",.4f")], tuple(parts.values())),
        bar_marks.numbers(beside, title),
        *bar_marks.notes(lines, title, is_timed=True),
    ]


# The colors of these parts are those that the parts of a step have: exposed communication has its own in both charts.
_EXPOSURE = {
    "exposed_communication_seconds": STEP_TITLES["exposed_communication_seconds"],
    "overlapped_communication_seconds": "overlapped with computing",
}


def exposed_communication(view: View) -> Chart | None:
    """Draw how long each line communicates in a step, in the open and while it computes; the most exposed come last."""
    lines = chart_lines(view) if view.draws_speeds else []
    timed = [line for line in lines if line.ok and line.row.get("step_seconds") is not None]
    ranks = [line for line in timed if (line.row.get("world_size") or 1) > 1]
    lines = [line for line in ranks if not line.is_timed or (line.row.get("pp") or 1) == 1 or any(_exposure(line))]
    times = {line.label: _exposure(line) for line in lines}
    if not any(exposed for exposed, _ in times.values()):
        return None
    lines = bar_marks.ordered(lines, lambda line: times[line.label][0])
    drawn = [line for line in lines if times[line.label][0] is not None]
    names = (*STEP_TITLES.values(), _EXPOSURE["overlapped_communication_seconds"])
    segments = [
        datum for line in drawn for datum in part_data(line, median_record(line).row, _EXPOSURE, MILLISECONDS.size)
    ]
    totals = {line.label: sum(part or 0.0 for part in times[line.label]) for line in drawn}
    ends = [(line.label, (times[line.label][0] or 0.0) / MILLISECONDS.size) for line in drawn]
    text = (
        f"Communication of {pluralize(len(drawn), 'configuration')} in ms per step: exposed while nothing is computed,"
        f" and overlapped with computing. Exposed: {range_text(ends)}."
        f"{' What pipelines send is part of their idle time.' * (len(lines) < len(ranks))}{untimed_text(lines)}"
    )
    parts = {str(rank): part for rank, part in enumerate(names)}
    title = "communication per step (ms; the figure is what is exposed)"
    exposed = {line.label: times[line.label][0] for line in drawn}
    layers = _layers(lines, segments, totals, title, parts, exposed)
    columns = {
        "run": [line.label for line in lines],
        "exposed (ms)": format_numbers([times[line.label][0] for line in lines], MILLISECONDS),
        "overlapped with computing (ms)": format_numbers([times[line.label][1] for line in lines], MILLISECONDS),
    }
    strategies = [line.strategy for line in lines]
    return bar_marks.bar_chart(
        view, "exposed", "Exposed communication", text, strategies, layers, columns, "exposed (ms)"
    )


def _exposure(line: ChartLine) -> tuple[float | None, float | None]:
    """Return the seconds of exposed and of overlapped communication, None where they are unknown or not to be drawn."""
    if not line.is_timed:
        return None, None
    row = median_record(line).row
    exposed, overlapped = (row.get(name) for name in _EXPOSURE)
    return exposed, overlapped
