"""The chart of losses over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.records.schema import Row
from harness.report.charts import marks
from harness.report.charts.lines import (
    ONE_OF_EACH,
    ChartLine,
    chart_lines,
    omitted_text,
    range_text,
    select,
    value_table,
)
from harness.report.charts.series import downsample, step_losses
from harness.report.charts.style import alt
from harness.report.comparability import comparability_key, group_by
from harness.report.document import Chart, Table
from harness.report.labels import value_text
from harness.report.text import pluralize
from harness.report.view import View
from harness.util.text import sanitize

_DASH = 10  # pixels

_COINCIDE = 1e-3  # relative


_MOST = 24  # curves of one chart, most of which coincide

Curve = tuple[ChartLine, Sequence[tuple[int, float, str]]]  # a line with step, loss and phase of its median repeat


def losses(view: View) -> list[Chart]:
    """Draw the losses of the median repeat of every line, one chart for each training: model, precision and batch."""
    ok = [line for line in chart_lines(view) if line.ok]
    trainings = group_by(ok, lambda line: comparability_key(line.row))
    charts: list[Chart] = []
    for lines in trainings.values():
        curves = [(line, curve) for line in select(lines, _MOST) if (curve := step_losses(view, line))]
        if curves:
            rank = len(charts) + 1
            of = f": {_training(lines[0].row)}" if len(trainings) > 1 else ""
            name = f"losses-{rank}" if rank > 1 else "losses"
            charts.append(_chart(view, name, f"Training loss by step{of}", curves, len(lines)))
    return charts


def _training(row: Row) -> str:
    size = value_text("parameters", row["parameters"]) if row.get("parameters") else ""
    tokens = f"{row.get('global_batch')} × {row.get('seq_len')} tokens"
    parts = (" ".join(part for part in (row.get("model"), size) if part), row.get("precision"), tokens)
    return sanitize(", ".join(str(part) for part in parts if part))


def _chart(view: View, name: str, title: str, curves: Sequence[Curve], total: int) -> Chart:
    steps = [{step: loss for step, loss, _ in curve} for _, curve in curves]
    apart = _apart(steps)
    difference = (
        f" Losses at the same step differ by at most {apart:.2g}; curves that coincide are drawn as one, with dashes in"
        " the colors of all."
    )
    last = [(line.label, curve[-1][1]) for line, curve in curves]
    alt_text = (
        f"Training losses of {pluralize(len(curves), 'configuration')} over"
        f" {max(len(curve) for _, curve in curves)} steps, the last {range_text(last, '.6g')}."
        f"{difference if len(curves) > 1 else ''}{omitted_text(len(curves), total, ONE_OF_EACH)}"
    )
    bundles = _bundles(steps)
    dashes = _dashes(bundles, len(curves))
    points = [
        line.datum(x=curve[at][0], y=curve[at][1], phase=curve[at][2], begin=dashes[place][1], dash=dashes[place][0])
        for place, (line, curve) in enumerate(curves)
        for at in downsample(len(curve))
    ]
    title_x = f"step (losses at the same step differ by at most {apart:.2g})" if len(curves) > 1 else "step"
    x = alt.X("x:Q", title=title_x, axis=alt.Axis(tickMinStep=1, format="d"), scale=alt.Scale(nice=False))
    y = alt.Y("y:Q", title="loss", scale=alt.Scale(zero=False))
    tooltip = marks.tooltips(("x:Q", "step", ",d"), ("y:Q", "loss", ".7f"), ("phase:N", "phase", ""))
    line_marks = marks.filterable_layer(points).mark_line(
        strokeWidth=2.5, strokeDash=alt.ExprRef("datum.dash"), strokeDashOffset=alt.ExprRef("datum.begin")
    )
    layers = [
        line_marks.encode(x=x, y=y, tooltip=tooltip, color=marks.strategy_color(view), detail="label:N"),
        _names(curves, bundles, x, y),
    ]
    vega_lite = marks.spec(view, title, layers, alt_text)
    return Chart(name, title, alt_text, vega_lite, _loss_table(curves))


def _names(curves: Sequence[Curve], bundles: Sequence[Sequence[int]], x: alt.X, y: alt.Y) -> alt.Chart:
    """Return the names at the ends of the curves, one for all that coincide; they belong to no strategy."""
    ends = []
    for bundle in bundles:
        rest = len(bundle) - 1
        text = curves[bundle[0]][0].label + (f" and {rest} more" if rest else "")
        if 1 < len(bundle) == len(curves):
            text = f"{f'all {len(bundle)}' if len(bundle) > 2 else 'both'} configurations"
        step, loss, _ = curves[bundle[0]][1][-1]
        ends.append({"strategy": "", "x": step, "y": loss, "short": text})
    text_marks = marks.static_layer(ends).mark_text(style="value", align="right", dy=-9)
    names: alt.Chart = text_marks.encode(x=x, y=y, text="short:N")
    return names


Losses = Mapping[int, float]  # by step


def _apart(curves: Sequence[Losses]) -> float:
    """Return the largest difference between curves at one step."""
    at = {step: [curve[step] for curve in curves if step in curve] for curve in curves for step in curve}
    return max(max(losses) - min(losses) for losses in at.values())


def _bundles(curves: Sequence[Losses]) -> list[list[int]]:
    """Return the positions of curves in groups of those that coincide."""
    bundles: list[list[int]] = []
    for position, curve in enumerate(curves):
        for bundle in bundles:
            first = curves[bundle[0]]
            shared = first.keys() & curve.keys()
            if all(abs(first[step] - curve[step]) <= _COINCIDE * abs(first[step]) for step in shared):
                bundle.append(position)
                break
        else:
            bundles.append([position])
    return bundles


def _dashes(bundles: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], int]]:
    """Return dash and gap of each curve and their offset, in pixels: curves that coincide alternate along the way."""
    dashes: list[tuple[list[int], int]] = [([1, 0], 0)] * count
    for bundle in bundles:
        for rank, position in enumerate(bundle):
            if len(bundle) > 1:
                dashes[position] = ([_DASH, _DASH * (len(bundle) - 1)], -_DASH * rank)
    return dashes


def _loss_table(curves: Sequence[Curve]) -> Table:
    """Return the losses at a few steps, evenly spaced over all."""
    steps = sorted({step for _, curve in curves for step, *_ in curve})
    few = (
        steps if len(steps) <= _COLUMNS else [steps[at * (len(steps) - 1) // (_COLUMNS - 1)] for at in range(_COLUMNS)]
    )
    by_step = [{step: loss for step, loss, _ in curve} for _, curve in curves]
    columns = {"run": [line.label for line, _ in curves]}
    for step in few:
        columns[f"loss at step {step}"] = [f"{losses[step]:.7f}" if step in losses else "" for losses in by_step]
    return value_table([line.strategy for line, _ in curves], columns)


_COLUMNS = 8  # steps of the table of losses
