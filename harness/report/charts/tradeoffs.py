"""The chart of the memory that checkpointing saves against the time that it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.records.schema import Row
from harness.report.charts import bar_marks, marks, style
from harness.report.charts.lines import (
    ChartLine,
    Datum,
    chart_lines,
    finite_number,
    range_text,
)
from harness.report.claim_peers import ok_runs, peer
from harness.report.comparability import PARTITION_COLUMNS
from harness.report.comparison_columns import UNSETTLED_MARK
from harness.report.document import Chart
from harness.report.speeds import are_alike
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
    cost: float | None  # the relative increase of step time, negative if the step is shorter; None if not ranked
    is_certain: bool  # whether the runs tell the two speeds apart

    @property
    def mark(self) -> str:
        """The mark behind a cost that the runs do not show with certainty."""
        return UNSETTLED_MARK * (self.cost is not None and not self.is_certain)


def savings(view: View) -> list[Saving]:
    """Return the savings of the lines that checkpoint and have a peer that does not; a cost only of ranked speeds."""
    known = [line for line in chart_lines(view) if line.ok]
    speeds = {line.row["run_id"]: line.standing.speed for line in known if line.is_ranked or line.is_simulated}
    lines = [line for line in known if line.row.get("checkpointing") not in (None, "none")]
    runs = ok_runs(view.lines) if lines else []
    by_id = {run.row["run_id"]: run for run in runs}
    all_savings = []
    for line in lines:
        run = by_id[line.row["run_id"]]
        plain = peer(run, runs, PARTITION_COLUMNS, checkpointing="none")
        names = ("peak_allocated_bytes", "activation_bytes", "step_seconds")
        peak, activations, cost = (_change(plain.row, run.row, name) if plain else None for name in names)
        if plain is not None and peak is not None:
            kind = sanitize(line.row["checkpointing"])
            speed, plain_speed = (speeds.get(record.row["run_id"]) for record in (run, plain))
            is_certain = False
            if speed is None or plain_speed is None:
                cost = None
            else:
                is_certain = speed.is_simulated or not are_alike(speed, plain_speed)
            saved = None if activations is None else -activations
            all_savings.append(Saving(line, kind, -peak, saved, cost, is_certain))
    return all_savings


def _change(before: Row, after: Row, name: str) -> float | None:
    old, new = finite_number(before.get(name)), finite_number(after.get(name))
    return new / old - 1 if old and new is not None else None


def checkpointing(view: View) -> Chart | None:
    """Draw the memory that each kind of checkpointing saves, with the time it costs if that is ranked.

    The largest saving comes first.
    """
    computed = savings(view)
    peaks = {saving.line.label: saving.peak for saving in computed}
    rows = bar_marks.ordered([saving.line for saving in computed], lambda line: -peaks[line.label])
    places = {line.label: line.position for line in rows}
    drawn = sorted(computed, key=lambda saving: places[saving.line.label])
    if not drawn:
        return None
    bars = [_bar(saving, places[saving.line.label]) for saving in drawn]
    costs = [(saving.line.label, 100 * saving.cost) for saving in drawn if saving.cost is not None]
    text = (
        f"Memory saved{' and time added' * bool(costs)} by checkpointing in"
        f" {pluralize(len(drawn), 'configuration')}, each relative to the same run without: peak memory saved, in %,"
        f" {range_text([(bar['label'], bar['value']) for bar in bars])}"
        + (f"; step time added, in %, {range_text(costs)}{_uncertain_text(drawn)}." if costs else ".")
    )
    figure = f", figure: step time added{f', {UNSETTLED_MARK}: not certain' * any(saving.mark for saving in drawn)}"
    title = f"memory saved (%; bar: peak, |: activations{figure * bool(costs)})"
    exact = [("kind:N", "checkpointing", ""), ("value:Q", "peak memory saved, %", ".2f")]
    exact += [("activations:Q", "activations saved, %", ".2f")]
    tooltip = marks.tooltips(*exact, *([("cost:Q", "step time added, %", "+.2f")] if costs else []))
    y, color = bar_marks.label_axis(), marks.strategy_color(view)
    known = [bar for bar in bars if bar["activations"] is not None]
    ticks = bar_marks.bar_layer(known).mark_tick(style="formula", thickness=3, size=style.step(len(bars)) - 4)
    layers = [
        bar_marks.bar_layer(bars)
        .mark_bar()
        .encode(x=bar_marks.from_zero("value", title), y=y, color=color, tooltip=tooltip),
        *([ticks.encode(x=bar_marks.from_zero("activations", title), y=y, tooltip=tooltip)] if known else []),
        *([bar_marks.numbers(bars, title)] if costs else []),
    ]
    name = "Memory savings and cost of activation checkpointing" if costs else "Memory saved by checkpointing"
    strategies, columns = [saving.line.strategy for saving in drawn], _columns(drawn)
    margin, measure = _ROOM if costs else 0, "peak memory saved (%)"
    return bar_marks.bar_chart(view, "checkpointing", name, text, strategies, layers, columns, measure, 2, margin)


def _uncertain_text(drawn: Sequence[Saving]) -> str:
    """Return which costs the runs do not show with certainty."""
    labels = [saving.line.label for saving in drawn if saving.mark]
    return f" (no certain difference: {', '.join(labels)})" if labels else ""


_ROOM = 90  # pixels behind the longest bar for the time added


def _bar(saving: Saving, position: int) -> Datum:
    """Return the data of a saving's bar, with the time added where that is known."""
    line, peak = replace(saving.line, position=position), 100 * saving.peak
    activations = None if saving.activations is None else 100 * saving.activations
    return line.datum(
        kind=saving.kind,
        value=peak,
        activations=activations,
        cost=None if saving.cost is None else 100 * saving.cost,
        total=max(peak, activations or 0.0, 0.0),
        shown="" if saving.cost is None else f"{100 * saving.cost:+.0f} %{saving.mark}",
    )


def _columns(drawn: Sequence[Saving]) -> dict[str, list[str]]:
    pairs = [format_percents([saving.peak, saving.activations]) for saving in drawn]
    return {
        "run": [saving.line.label for saving in drawn],
        "checkpointing": [saving.kind for saving in drawn],
        "peak memory saved (%)": [peak for peak, _ in pairs],
        "activations saved (%)": [activations for _, activations in pairs],
        "step time added (%)": [format_percents([saving.cost])[0] + saving.mark for saving in drawn],
    }
