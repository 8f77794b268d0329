"""The chart of losses over steps."""

from collections.abc import Mapping, Sequence

from harness.report.charts import marks, style
from harness.report.charts.lines import ChartLine, chart_lines, omitted_text, range_text, select, value_table
from harness.report.charts.series import downsample, step_losses
from harness.report.charts.style import alt
from harness.report.document import Chart, Table
from harness.report.text import pluralize
from harness.report.view import View

_DASH = 10  # pixels

_COINCIDE = 1e-3  # relative


def losses(view: View) -> Chart | None:
    """Draw the losses of the median repeat of every line in one chart."""
    ok = [line for line in chart_lines(view) if line.ok]
    drawn = select(ok)
    curves = [(line, curve) for line in drawn if (curve := step_losses(view, line))]
    if not curves:
        return None
    steps = {line.label: {step: loss for step, loss, _ in curve} for line, curve in curves}
    apart = _apart(list(steps.values()))
    difference = (
        f" Losses at the same step differ by at most {apart:.2g}; curves that coincide are drawn as one, with dashes in"
        " the colors of all."
    )
    difference = difference if len(curves) > 1 else ""
    last = [(line.label, curve[-1][1]) for line, curve in curves]
    alt_text = (
        f"Training losses of {pluralize(len(curves), 'configuration')} over"
        f" {max(len(curve) for _, curve in curves)} steps, the last"
        f" {range_text(last, '.6g')}.{difference}{omitted_text(len(drawn), len(ok))}"
    )
    dashes = _dashes(list(steps.values()))
    points = [
        line.datum(x=curve[at][0], y=curve[at][1], phase=curve[at][2], begin=begin)
        for (line, curve), (_, begin) in zip(curves, dashes, strict=True)
        for at in downsample(len(curve))
    ]
    channels = marks.by_label([line.label for line, _ in curves], [dash for dash, _ in dashes])
    title = f"step (losses at the same step differ by at most {apart:.2g})" if len(curves) > 1 else "step"
    x = alt.X("x:Q", title=title, axis=alt.Axis(tickMinStep=1, format="d"), scale=alt.Scale(nice=False))
    y = alt.Y("y:Q", title="loss", scale=alt.Scale(zero=False))
    tooltip = marks.tooltips(("x:Q", "step", ",d"), ("y:Q", "loss", ".7f"), ("phase:N", "phase", ""))
    curve = marks.filterable_layer(points).mark_line(strokeWidth=2.5, strokeDashOffset=alt.ExprRef("datum.begin"))
    layer = curve.encode(x=x, y=y, tooltip=tooltip, color=channels.color, strokeDash=channels.stroke_dash)
    return Chart("losses", "Training loss by step", alt_text, marks.spec([layer], alt_text), _loss_table(curves))


Losses = Mapping[int, float]  # by step


def _apart(curves: Sequence[Losses]) -> float:
    """Return the largest difference between curves at one step."""
    at = {step: [curve[step] for curve in curves if step in curve] for curve in curves for step in curve}
    return max(max(losses) - min(losses) for losses in at.values())


def _dashes(curves: Sequence[Losses]) -> list[tuple[list[int], int]]:
    """Return dash and gap of each curve and their offset, in pixels: curves that coincide alternate along the way."""
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
    usual = style.dashes(len(curves))
    return [
        ([_DASH, _DASH * (len(bundle) - 1)], -_DASH * bundle.index(position))
        if len(bundle) > 1
        else (usual[position], 0)
        for position in range(len(curves))
        for bundle in bundles
        if position in bundle
    ]


def _loss_table(curves: Sequence[tuple[ChartLine, Sequence[tuple[int, float, str]]]]) -> Table:
    """Return the losses at a few steps, evenly spaced over all."""
    steps = sorted({step for _, curve in curves for step, *_ in curve})
    few = (
        steps if len(steps) <= _COLUMNS else [steps[at * (len(steps) - 1) // (_COLUMNS - 1)] for at in range(_COLUMNS)]
    )
    by_step = [{step: loss for step, loss, _ in curve} for _, curve in curves]
    rows = [
        (line.label, *("" if step not in losses else f"{losses[step]:.7f}" for step in few))
        for (line, _), losses in zip(curves, by_step, strict=True)
    ]
    return value_table(["run", *(f"loss at step {step}" for step in few)], rows, [line.strategy for line, _ in curves])


_COLUMNS = 8  # steps of the table of losses
