"""Pictures of how a strategy trains: the bytes it sends and its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.errors import printable
from harness.report import comparison as c
from harness.report.charts import lines as data
from harness.report.charts import marks, style
from harness.report.charts.lazy import alt
from harness.report.charts.lines import Line
from harness.report.charts.series import losses as losses_of
from harness.report.charts.series import thinned
from harness.report.document import Grid, Picture
from harness.report.view import View

_COLUMNS = 8  # steps of the table of losses
_DASH = 10  # pixels
_COINCIDE = 1e-3  # relative


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
        f"Bytes a rank sends in a step of {data.counted(drawn)} by mesh axis ({', '.join(axes)}) in {unit.name}, beside"
        f" the layout's formula: {data.extremes(ends)}."
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


def losses(view: View) -> Picture | None:
    """The losses of every line, one repeat of each, over each other."""
    ok = [line for line in data.lines(view) if line.ok]
    drawn = data.chosen(ok)
    curves = [(line, curve) for line in drawn if (curve := losses_of(view, line))]
    if not curves:
        return None
    steps = {line.label: {step: loss for step, loss, _ in curve} for line, curve in curves}
    apart = _apart(list(steps.values()))
    together = (
        f" At the same step they differ by at most {apart:.2g}; curves that coincide are drawn as one whose dashes have"
        " the colours of all."
    )
    together = together if len(curves) > 1 else ""
    last = [(line.label, curve[-1][1]) for line, curve in curves]
    said = (
        f"Losses of {data.counted(curves)} over {max(len(curve) for _, curve in curves)} steps, the last"
        f" {data.extremes(last, '.6g')}.{together}{data.left_out(len(drawn), len(ok))}"
    )
    dashes = _dashes(list(steps.values()))
    points = [
        line.datum(x=curve[at][0], y=curve[at][1], phase=curve[at][2], begin=begin)
        for (line, curve), (_, begin) in zip(curves, dashes, strict=True)
        for at in thinned(len(curve))
    ]
    looks = marks.by_label([line.label for line, _ in curves], [dash for dash, _ in dashes])
    title = f"step (at each, losses differ by at most {apart:.2g})" if len(curves) > 1 else "step"
    x = alt.X("x:Q", title=title, axis=alt.Axis(tickMinStep=1, format="d"), scale=alt.Scale(nice=False))
    y = alt.Y("y:Q", title="loss", scale=alt.Scale(zero=False))
    tooltip = marks.tooltips(("x:Q", "step", ",d"), ("y:Q", "loss", ".7f"), ("phase:N", "phase", ""))
    curve = marks.of(points).mark_line(strokeWidth=2.5, strokeDashOffset=alt.ExprRef("datum.begin"))
    layer = curve.encode(x=x, y=y, tooltip=tooltip, color=looks["color"], strokeDash=looks["strokeDash"])
    return Picture("losses", "Losses", said, marks.spec([layer], said), _loss_table(curves))


Losses = Mapping[int, float]  # by step


def _apart(curves: Sequence[Losses]) -> float:
    """The largest difference at one step."""
    at = {step: [curve[step] for curve in curves if step in curve] for curve in curves for step in curve}
    return max(max(losses) - min(losses) for losses in at.values())


def _dashes(curves: Sequence[Losses]) -> list[tuple[list[int], int]]:
    """Dash and gap in pixels of each curve, and where they begin: those that coincide take turns along their way."""
    bundles: list[list[int]] = []
    for place, curve in enumerate(curves):
        for bundle in bundles:
            first = curves[bundle[0]]
            shared = first.keys() & curve.keys()
            if all(abs(first[step] - curve[step]) <= _COINCIDE * abs(first[step]) for step in shared):
                bundle.append(place)
                break
        else:
            bundles.append([place])
    usual = style.dashes(len(curves))
    return [
        ([_DASH, _DASH * (len(bundle) - 1)], -_DASH * bundle.index(place)) if len(bundle) > 1 else (usual[place], 0)
        for place in range(len(curves))
        for bundle in bundles
        if place in bundle
    ]


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
