"""Pictures of how a strategy trains: bytes it sends, what checkpointing saves and costs, and its losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import printable
from harness.records import Row
from harness.report import comparison as c
from harness.report.charts import lines as data
from harness.report.charts import marks, style
from harness.report.charts.lazy import alt
from harness.report.charts.lines import Line
from harness.report.charts.series import losses as losses_of
from harness.report.charts.series import thinned
from harness.report.document import Grid, Picture
from harness.report.peers import DIVISION, ended_well, peer
from harness.report.view import View

_COLUMNS = 8  # steps of the table of losses
_WIDEST, _THINNEST = 7.0, 1.5  # pixels


def traffic(view: View) -> Picture | None:
    """Bytes that the busiest rank sends along each mesh axis, and the formula's."""
    found = [line for line in data.lines(view) if line.ok and _entries(line)]
    if not found:
        return None
    drawn = data.chosen(found)
    entries = [(line, axis, sent, formula) for line in drawn for axis, sent, formula in _entries(line)]
    axes = list(dict.fromkeys(axis for _, axis, *_ in entries))
    unit = c.byte_unit([size for *_, sent, formula in entries for size in (sent, formula)])
    ends = [(f"{line.label} on {axis}", sent / unit.size) for line, axis, sent, _ in entries]
    said = (
        f"Bytes a rank sends in a step of {len(drawn)} lines by mesh axis ({', '.join(axes)}) in {unit.name}, beside"
        f" the layout's formula: from {data.extremes(ends)}."
        f"{data.left_out(len(drawn), len(found))}"
    )
    shown = c.scaled([sent for _, _, sent, _ in entries], unit)
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
    scale = alt.Scale(domain=axes, range=style.colours(len(axes)))
    legend = alt.Legend(orient="top", title="mesh axis") if len(axes) > 1 else None
    layers = [
        marks.of(bars)
        .mark_bar()
        .encode(
            x=marks.from_zero("value", title),
            y=y,
            tooltip=tooltip,
            color=alt.Color("axis:N", scale=scale, legend=legend),
        ),
        marks.of([bar for bar in bars if bar["formula"] is not None])
        .mark_tick(style="formula", thickness=3, size=style.step(len(bars)) - 4)
        .encode(x=marks.from_zero("formula", title), y=y, tooltip=tooltip),
        marks.of(bars)
        .mark_text(align="left", dx=6, style="value")
        .encode(x=marks.from_zero("total", title), y=y, text="shown:N", tooltip=tooltip),
    ]
    formulas = c.scaled([formula for *_, formula in entries], unit)
    rows = [
        (line.label, axis, *texts)
        for (line, axis, *_), texts in zip(entries, zip(shown, formulas, strict=True), strict=True)
    ]
    header = ["run", "mesh axis", f"sent ({unit.name})", f"formula ({unit.name})"]
    table = data.table(header, rows, [line.strategy for line, *_ in entries], 2)
    return Picture("traffic", "Bytes sent by mesh axis", said, marks.bars(layers, said, len(bars)), table)


def _entries(line: Line) -> list[tuple[str, float, float | None]]:
    """Axis, bytes, and the formula's."""
    return [
        (printable(entry.get("axis") or ""), sent, data.number(entry.get("formula_bytes")))
        for entry in data.typical(line).get("traffic") or []
        if (sent := data.number(entry.get("bytes"))) is not None
    ]


@dataclass(frozen=True)
class Saving:
    """What a kind of checkpointing does to a run, over the same run without it."""

    line: Line
    kind: str
    peak: float  # less of the peak, relative
    activations: float | None  # less of activations, relative
    cost: float  # longer step, relative; below 0 it is shorter


def savings(view: View) -> list[Saving]:
    runs = ended_well(view.lines)
    named = {run.label: run for run in runs}
    found = []
    for line in data.lines(view):
        kind, run = line.row.get("checkpointing"), named.get(line.label)
        plain = peer(run, runs, DIVISION, checkpointing="none") if run and kind not in (None, "none") else None
        if run is None or plain is None:
            continue
        peak, held, cost = (
            _change(plain.row, run.row, name) for name in ("peak_allocated_bytes", "activation_bytes", "step_seconds")
        )
        if peak is not None and cost is not None:
            found.append(Saving(line, printable(kind), -peak, None if held is None else -held, cost))
    return found


def _change(before: Row, after: Row, name: str) -> float | None:
    old, new = data.number(before.get(name)), data.number(after.get(name))
    return new / old - 1 if old and new is not None else None


def checkpointing(view: View) -> Picture | None:
    """Memory saved against time lost, each kind over the same run without it."""
    found = savings(view)
    places = {line.place for line in data.chosen([saving.line for saving in found])}
    drawn = [saving for saving in found if saving.line.place in places]
    if not drawn:
        return None
    kinds = list(dict.fromkeys(saving.kind for saving in drawn))
    points = [
        saving.line.datum(
            kind=saving.kind,
            x=100 * saving.cost,
            y=100 * saving.peak,
            held=None if saving.activations is None else 100 * saving.activations,
        )
        for saving in drawn
    ]
    said = (
        f"What checkpointing saves and costs in {len(drawn)} lines, each over the same run without: peak memory saved,"
        f" in %, from {data.extremes([(p['label'], p['y']) for p in points])}; step longer, in %, from"
        f" {data.extremes([(p['label'], p['x']) for p in points])}.{data.left_out(len(drawn), len(found))}"
    )
    saved = [value for point in points for value in (point["y"], point["held"]) if value is not None]
    x = marks.spanning("x", "step longer than without checkpointing (%)", [0.0, *(point["x"] for point in points)])
    y = marks.spanning("y", "memory saved (%): points: peak, bars: activations", [0.0, *saved])
    held = marks.spanning("held", "memory saved (%): points: peak, bars: activations", [0.0, *saved])
    tooltip = marks.tooltips(
        ("kind:N", "checkpointing", ""),
        ("y:Q", "peak saved, %", ".2f"),
        ("held:Q", "activations saved, %", ".2f"),
        ("x:Q", "step longer, %", "+.2f"),
    )
    color = alt.Color("kind:N", title="checkpointing", scale=alt.Scale(domain=kinds, range=style.colours(len(kinds))))
    shape = alt.Shape("kind:N", title="checkpointing", scale=alt.Scale(domain=kinds, range=style.shapes(len(kinds))))
    known = marks.of([point for point in points if point["held"] is not None])
    layers = [
        marks.fixed([{"strategy": "", "x": 0}]).mark_rule(style="reference").encode(x=x),
        marks.fixed([{"strategy": "", "y": 0}]).mark_rule(style="reference").encode(y=y),
        known.mark_rule(strokeWidth=1.5).encode(x=x, y=y, y2="held:Q", color=color, tooltip=tooltip),
        known.mark_tick(orient="horizontal", size=10, thickness=2).encode(x=x, y=held, color=color, tooltip=tooltip),
        marks.of(points)
        .mark_point(filled=True, size=90, opacity=1)
        .encode(x=x, y=y, color=color, shape=shape, tooltip=tooltip),
        *marks.labels(points, x, y),
    ]
    rows = [
        (saving.line.label, saving.kind, *c.percents([saving.peak, saving.activations, saving.cost]))
        for saving in drawn
    ]
    header = ["run", "checkpointing", "peak saved (%)", "activations saved (%)", "step longer (%)"]
    table = data.table(header, rows, [saving.line.strategy for saving in drawn], 2)
    return Picture("checkpointing", "What checkpointing saves and costs", said, marks.spec(layers, said), table)


def losses(view: View) -> Picture | None:
    """The losses of every line, one repeat of each, over each other."""
    drawn = data.chosen([line for line in data.lines(view) if line.ok])
    curves = [(line, curve) for line in drawn if (curve := losses_of(view, line))]
    if not curves:
        return None
    widths = [_WIDEST + (_THINNEST - _WIDEST) * place / max(1, len(curves) - 1) for place in range(len(curves))]
    ends = [(line.label, curve[-1][1]) for line, curve in curves]
    said = (
        f"Losses of {len(curves)} lines over {max(len(curve) for _, curve in curves)} steps; the last from"
        f" {data.extremes(ends, '.6g')}. Curves that coincide are drawn over each other, the first widest."
    )
    points = [
        line.datum(x=curve[at][0], y=curve[at][1], phase=curve[at][2])
        for line, curve in curves
        for at in thinned(len(curve))
    ]
    looks = marks.by_label([line.label for line, _ in curves])
    x = alt.X("x:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d"), scale=alt.Scale(nice=False))
    y = alt.Y("y:Q", title="loss", scale=alt.Scale(zero=False))
    tooltip = marks.tooltips(("x:Q", "step", ",d"), ("y:Q", "loss", ".7f"), ("phase:N", "phase", ""))
    size = alt.StrokeWidth("label:N", scale=alt.Scale(domain=[line.label for line, _ in curves], range=widths))
    layers = [
        marks.of(points)
        .mark_line()
        .encode(x=x, y=y, tooltip=tooltip, color=looks["color"], strokeDash=looks["strokeDash"], strokeWidth=size)
    ]
    table = _loss_table(curves)
    return Picture("losses", "Losses", said, marks.spec(layers, said), table)


def _loss_table(curves: Sequence[tuple[Line, Sequence[tuple[int, float, str]]]]) -> Grid:
    """The losses at a few steps, evenly over all."""
    steps = sorted({step for _, curve in curves for step, *_ in curve})
    few = (
        steps if len(steps) <= _COLUMNS else [steps[at * (len(steps) - 1) // (_COLUMNS - 1)] for at in range(_COLUMNS)]
    )
    by_step = [{step: loss for step, loss, _ in curve} for _, curve in curves]
    rows = [
        (line.label, *("" if step not in losses else f"{losses[step]:.7f}" for step in few))
        for (line, _), losses in zip(curves, by_step, strict=True)
    ]
    return data.table(["run", *(f"loss at step {step}" for step in few)], rows, [line.strategy for line, _ in curves])
