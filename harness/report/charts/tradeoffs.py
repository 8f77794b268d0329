"""The chart of the memory that checkpointing saves against the time that it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.records.schema import Row
from harness.report.charts import marks, style
from harness.report.charts.lines import (
    FASTEST,
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
from harness.report.comparability import PARTITION_COLUMNS
from harness.report.document import Chart, Table
from harness.report.text import format_percents, pluralize
from harness.report.view import View
from harness.util.text import sanitize


@dataclass(frozen=True)
class Saving:
    """The effect of a kind of checkpointing on a run, relative to the same run without it."""

    line: ChartLine
    kind: str
    peak: float  # the part of the peak that it saves
    activations: float | None  # the part of activation memory that it saves
    cost: float  # the relative increase of step time; negative if the step is shorter


def savings(view: View) -> list[Saving]:
    """Return the savings of the undisturbed lines that checkpoint and have an undisturbed peer that does not."""
    known = [line for line in chart_lines(view) if line.ok]
    disturbed = {line.row["run_id"] for line in known if line.is_disturbed}
    lines = [line for line in known if line.row.get("checkpointing") not in (None, "none") and not line.is_disturbed]
    runs = ok_runs(view.lines) if lines else []
    by_id = {run.row["run_id"]: run for run in runs}
    all_savings = []
    for line in lines:
        run = by_id[line.row["run_id"]]
        plain = peer(run, runs, PARTITION_COLUMNS, checkpointing="none")
        if plain is not None and plain.row["run_id"] in disturbed:
            continue
        names = ("peak_allocated_bytes", "activation_bytes", "step_seconds")
        peak, activations, cost = (_change(plain.row, run.row, name) if plain else None for name in names)
        if peak is not None and cost is not None:
            kind = sanitize(line.row["checkpointing"])
            all_savings.append(Saving(line, kind, -peak, None if activations is None else -activations, cost))
    return all_savings


def _change(before: Row, after: Row, name: str) -> float | None:
    old, new = finite_number(before.get(name)), finite_number(after.get(name))
    return new / old - 1 if old and new is not None else None


_CHECKPOINTING = "Memory savings and cost of activation checkpointing"


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
        f" {range_text([(p['label'], p['x']) for p in points])}.{omitted_text(len(drawn), len(all_savings), FASTEST)}"
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
    color = marks.strategy_color(view)
    shape = alt.Shape("kind:N", title="checkpointing", scale=alt.Scale(domain=kinds, range=style.shapes(len(kinds))))
    known = marks.filterable_layer([point for point in points if point["activations"] is not None])
    bars = [[p, p | {"y": p["activations"]}] for p in points if p["activations"] is not None]
    (left, right), (bottom, top) = (axis.to_dict()["scale"]["domain"] for axis in (x, y))
    zero_lines = [[{"x": 0.0, "y": bottom}, {"x": 0.0, "y": top}], [{"x": left, "y": 0.0}, {"x": right, "y": 0.0}]]
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
        *marks.labels(points, x, y, bars + zero_lines, 90),
    ]
    return Chart(
        "checkpointing",
        _CHECKPOINTING,
        alt_text,
        marks.spec(view, _CHECKPOINTING, layers, alt_text),
        savings_table(drawn),
        2,
    )


def savings_table(drawn: Sequence[Saving]) -> Table:
    """Return the drawn savings as a table, in percent."""
    rows = [
        (saving.line.label, saving.kind, *format_percents([saving.peak, saving.activations, saving.cost]))
        for saving in drawn
    ]
    header = ["run", "checkpointing", "peak memory saved (%)", "activations saved (%)", "step time added (%)"]
    return value_table(header, rows, [saving.line.strategy for saving in drawn], 2)
