"""Charts of trade-offs: memory against speed, and the memory that checkpointing saves against the time it costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.records.schema import Row
from harness.report.best import pareto_front
from harness.report.charts import marks, style
from harness.report.charts.lines import (
    ChartLine,
    chart_lines,
    finite_number,
    omitted_text,
    range_text,
    select,
    value_table,
)
from harness.report.charts.style import alt
from harness.report.claim_peers import ok_runs, peer
from harness.report.comparability import PARTITION_COLUMNS, comparability_key, group_by
from harness.report.document import Chart, Table
from harness.report.text import ONE, Unit, byte_unit, format_numbers, format_percents, pluralize
from harness.report.view import View
from harness.util.text import sanitize


def trade(view: View) -> Chart | None:
    """Draw peak memory against speed, which is per device where world sizes differ.

    The lines that no other beats in both are the front. Of several groups of comparable lines the largest is drawn.
    """
    lines = [line for line in chart_lines(view) if line.speed and line.number("peak_allocated_bytes")]
    settings = group_by(lines, lambda line: comparability_key(line.row))
    comparable: list[ChartLine] = max(settings.values(), key=len, default=[])
    column, rate = "tokens_per_second", "tokens per second"
    if len({line.row.get("world_size") for line in comparable}) > 1:
        column, rate = "tokens_per_second_per_device", "tokens per second and device"
    known = ((line, line.number("peak_allocated_bytes"), line.number(column)) for line in comparable)
    pairs = [(line, peak, speed) for line, peak, speed in known if peak and speed]
    positions = {line.position for line in select([line for line, *_ in pairs])}
    drawn = [pair for pair in pairs if pair[0].position in positions]
    if len(drawn) < 2:
        return None
    unit = byte_unit([peak for _, peak, _ in drawn])
    on_front = pareto_front([(peak, speed) for _, peak, speed in drawn])
    points = [
        line.datum(
            x=speed,
            y=peak / unit.size,
            exact=peak,
            first=best,
            on="yes" if best else "no",
        )
        for (line, peak, speed), best in zip(drawn, on_front, strict=True)
    ]
    front = sorted((point for point in points if point["first"]), key=lambda point: point["x"])
    largest = f", the largest of {len(settings)} groups of comparable ones" if len(settings) > 1 else ""
    alt_text = (
        f"Peak memory in {unit.name} against {rate} of {pluralize(len(drawn), 'configuration')}{largest}. No other is"
        f" both as fast and as small as {', '.join(point['label'] for point in front)}; peaks"
        f" {range_text([(point['label'], point['y']) for point in points])}, {rate}"
        f" {range_text([(point['label'], point['x']) for point in points])}.{omitted_text(len(drawn), len(pairs))}"
    )
    x = marks.spanning("x", f"{rate} (higher is better)", [point["x"] for point in points])
    y = marks.spanning("y", f"peak memory ({unit.name}, lower is better)", [point["y"] for point in points])
    tooltip = marks.tooltips(
        ("x:Q", rate, ",.2f"), ("exact:Q", "peak, bytes", ",d"), ("on:N", "on the Pareto front", "")
    )
    layers = [
        marks.filterable_layer(front).mark_line(style="front").encode(x=x, y=y),
        marks.filterable_layer([p for p in points if not p["first"]])
        .mark_point(filled=False, size=70, strokeWidth=2, color=style.MEASURED, shape="circle")
        .encode(x=x, y=y, tooltip=tooltip),
        marks.filterable_layer(front)
        .mark_point(filled=True, size=110, opacity=1, color=style.MEASURED, shape="diamond")
        .encode(x=x, y=y, tooltip=tooltip),
        *marks.labels(points, x, y, [front]),
    ]
    table = front_table(drawn, on_front, unit, rate)
    return Chart("trade", "Peak memory and speed", alt_text, marks.spec(layers, alt_text), table)


def front_table(
    drawn: Sequence[tuple[ChartLine, float, float]], on_front: Sequence[bool], unit: Unit, rate: str
) -> Table:
    """Return the drawn lines as a table: peaks in `unit`, speeds as `rate`, and whether each is on the Pareto front."""
    columns = [
        format_numbers([peak for _, peak, _ in drawn], unit),
        format_numbers([speed for *_, speed in drawn], ONE),
    ]
    rows = [
        (line.label, *texts, "yes" if best else "")
        for (line, *_), texts, best in zip(drawn, zip(*columns, strict=True), on_front, strict=True)
    ]
    header = ["run", f"peak ({unit.name})", rate, "on the Pareto front"]
    return value_table(header, rows, [line.strategy for line, *_ in drawn])


@dataclass(frozen=True)
class Saving:
    """The effect of a kind of checkpointing on a run, relative to the same run without it."""

    line: ChartLine
    kind: str
    peak: float  # the part of the peak that it saves
    activations: float | None  # the part of activation memory that it saves
    cost: float  # the relative increase of step time; negative if the step is shorter


def savings(view: View) -> list[Saving]:
    """Return the savings of the lines that checkpoint and have a peer that does not."""
    lines = [line for line in chart_lines(view) if line.ok and line.row.get("checkpointing") not in (None, "none")]
    runs = ok_runs(view.lines) if lines else []
    by_id = {run.row["run_id"]: run for run in runs}
    all_savings = []
    for line in lines:
        run = by_id[line.row["run_id"]]
        plain = peer(run, runs, PARTITION_COLUMNS, checkpointing="none")
        names = ("peak_allocated_bytes", "activation_bytes", "step_seconds")
        peak, activations, cost = (_change(plain.row, run.row, name) if plain else None for name in names)
        if peak is not None and cost is not None:
            kind = sanitize(line.row["checkpointing"])
            all_savings.append(Saving(line, kind, -peak, None if activations is None else -activations, cost))
    return all_savings


def _change(before: Row, after: Row, name: str) -> float | None:
    old, new = finite_number(before.get(name)), finite_number(after.get(name))
    return new / old - 1 if old and new is not None else None


def checkpointing(view: View) -> Chart | None:
    """Draw the memory that each kind of checkpointing saves against the time it costs."""
    all_savings = savings(view)
    positions = {line.position for line in select([saving.line for saving in all_savings])}
    drawn = [saving for saving in all_savings if saving.line.position in positions]
    if not drawn:
        return None
    kinds = list(dict.fromkeys(saving.kind for saving in drawn))
    points = [
        saving.line.datum(
            kind=saving.kind,
            x=100 * saving.cost,
            y=100 * saving.peak,
            activations=None if saving.activations is None else 100 * saving.activations,
        )
        for saving in drawn
    ]
    alt_text = (
        f"Memory saved and time added by checkpointing in {pluralize(len(drawn), 'configuration')}, each relative to"
        " the same run without:"
        f" peak memory saved, in %, {range_text([(p['label'], p['y']) for p in points])}; step time added, in %,"
        f" {range_text([(p['label'], p['x']) for p in points])}.{omitted_text(len(drawn), len(all_savings))}"
    )
    saved = [value for point in points for value in (point["y"], point["activations"]) if value is not None]
    x = marks.spanning(
        "x", "step time added (% of the step without checkpointing)", [0.0, *(point["x"] for point in points)], 0.25
    )
    title = "memory saved (%; point = peak, dash = activations)"
    y = marks.spanning("y", title, [0.0, *saved])
    activations = marks.spanning("activations", title, [0.0, *saved])
    tooltip = marks.tooltips(
        ("kind:N", "checkpointing", ""),
        ("y:Q", "peak memory saved, %", ".2f"),
        ("activations:Q", "activations saved, %", ".2f"),
        ("x:Q", "step time added, %", "+.2f"),
    )
    color = alt.Color("kind:N", title="checkpointing", scale=alt.Scale(domain=kinds, range=style.colors(len(kinds))))
    shape = alt.Shape("kind:N", title="checkpointing", scale=alt.Scale(domain=kinds, range=style.shapes(len(kinds))))
    known = marks.filterable_layer([point for point in points if point["activations"] is not None])
    bars = [[p, p | {"y": p["activations"]}] for p in points if p["activations"] is not None]
    layers = [
        marks.static_layer([{"strategy": "", "x": 0}]).mark_rule(style="reference").encode(x=x),
        marks.static_layer([{"strategy": "", "y": 0}]).mark_rule(style="reference").encode(y=y),
        known.mark_rule(strokeWidth=1.5).encode(x=x, y=y, y2="activations:Q", color=color, tooltip=tooltip),
        known.mark_tick(orient="horizontal", size=10, thickness=2, opacity=1).encode(
            x=x, y=activations, color=color, tooltip=tooltip
        ),
        marks.filterable_layer(points)
        .mark_point(filled=True, size=90, opacity=1)
        .encode(x=x, y=y, color=color, shape=shape, tooltip=tooltip),
        *marks.labels(points, x, y, bars, 90),
    ]
    return Chart(
        "checkpointing",
        "Memory savings and cost of activation checkpointing",
        alt_text,
        marks.spec(layers, alt_text),
        savings_table(drawn),
    )


def savings_table(drawn: Sequence[Saving]) -> Table:
    """Return the drawn savings as a table, in percent."""
    rows = [
        (saving.line.label, saving.kind, *format_percents([saving.peak, saving.activations, saving.cost]))
        for saving in drawn
    ]
    header = ["run", "checkpointing", "peak memory saved (%)", "activations saved (%)", "step time added (%)"]
    return value_table(header, rows, [saving.line.strategy for saving in drawn], 2)
