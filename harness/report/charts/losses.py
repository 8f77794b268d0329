"""The charts of losses over steps."""

import json
from collections.abc import Mapping, Sequence

from harness.records.schema import Row
from harness.report.charts import marks
from harness.report.charts.curves import ONE_OF_EACH, select
from harness.report.charts.marks import Field, Rows, Scale, column, spanning
from harness.report.charts.setting import setting_lines
from harness.report.comparability import comparability_key, group_by
from harness.report.document import Chart
from harness.report.labels import value_text
from harness.report.lines import Datum, Line, finite_number
from harness.report.sentences import sentence
from harness.report.view import View
from harness.util.text import sanitize

_DASH = 10  # pixels

_COINCIDE = 1e-3  # relative

_POINTS = 240  # of one curve

_MOST = 24  # curves of one chart, most of which coincide

_COLUMNS = 8  # steps of the table of losses, evenly spaced over all

Losses = Mapping[int, tuple[float, str]]  # the loss of the median repeat and its phase, by step


def losses(view: View) -> list[Chart]:
    """Draw the losses of the median repeat of every line, one chart for each training: model, precision and batch."""
    ok = [line for line in view.lines if line.ok]
    trainings = group_by(ok, lambda line: comparability_key(line.row))
    charts: list[Chart] = []
    for lines in trainings.values():
        curves = [(line, curve) for line in select(lines, _MOST) if (curve := _step_losses(view, line))]
        if curves:
            of = f": {_training(lines[0].row)}" if len(trainings) > 1 else ""
            name = f"losses-{len(charts) + 1}" if charts else "losses"
            charts.append(_chart(view, name, f"Training loss by step{of}", curves, len(lines)))
    return charts


def _step_losses(view: View, line: Line) -> dict[int, tuple[float, str]]:
    """Return loss and phase by step of a line's median run from its steps.jsonl; empty if there is no such file."""
    folder = view.folders.get(line.median_run.row["run_id"])
    losses: dict[int, tuple[float, str]] = {}
    try:
        lines = (folder / "steps.jsonl").read_text(encoding="utf-8", errors="replace").splitlines() if folder else []
    except OSError:
        return losses
    for text in lines:
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            continue  # the last line of a run that was killed
        entry = entry if isinstance(entry, dict) else {}
        step, loss = finite_number(entry.get("step")), finite_number(entry.get("loss"))
        if step is not None and loss is not None:
            losses[int(step)] = loss, sanitize(entry.get("phase") or "")
    return losses


def _downsample(count: int) -> list[int]:
    """Return the positions of at most _POINTS of `count` points: evenly, the first and the last among them."""
    if count <= _POINTS:
        return list(range(count))
    return [round(point * (count - 1) / (_POINTS - 1)) for point in range(_POINTS)]


def _training(row: Row) -> str:
    size = value_text("parameters", row["parameters"]) if row.get("parameters") else ""
    tokens = f"{row.get('global_batch')} × {row.get('seq_len')} tokens"
    parts = (" ".join(part for part in (row.get("model"), size) if part), row.get("precision"), tokens)
    return sanitize(", ".join(str(part) for part in parts if part))


def _chart(view: View, name: str, title: str, curves: Sequence[tuple[Line, Losses]], total: int) -> Chart:
    lines, by_step = [line for line, _ in curves], [curve for _, curve in curves]
    steps = sorted({step for curve in by_step for step in curve})
    few = (
        steps if len(steps) <= _COLUMNS else [steps[at * (len(steps) - 1) // (_COLUMNS - 1)] for at in range(_COLUMNS)]
    )
    last = [curve[max(curve)][0] for curve in by_step]
    fields = {"last": Field("", last, [f"{loss:.6g}" for loss in last])}
    for step in few:
        cells = [f"{curve[step][0]:.7f}" if step in curve else "" for curve in by_step]
        fields[f"loss at step {step}"] = column(f"loss at step {step}", cells)
    rows = Rows(lines, fields)
    at_step = [[curve[step][0] for curve in by_step if step in curve] for step in steps]
    apart = max(max(values) - min(values) for values in at_step)
    facts = {"steps": max(map(len, by_step)), "apart": apart}
    omitted = sentence("chart_omitted", drawn=len(curves), total=total, rule=ONE_OF_EACH)
    title_x = f"step (losses at the same step differ by at most {apart:.2g})" if len(curves) > 1 else "step"
    x = Scale(title_x, (steps[0], steps[-1]), form="d").channel("x")
    y = spanning("loss", [loss for values in at_step for loss in values]).channel("y")
    exact = marks.tooltip(("label", "run", ""), ("x", "step", ",d"), ("y", "loss", ".7f"), ("phase", "phase", ""))
    color, bundles = marks.strategy_color(view), _bundles(by_step)
    layers = [
        marks.layer("line dashed", "points", x=x, y=y, tooltip=exact, color=color, detail="label"),
        marks.layer("text ending", "ends", x=x, y=y, text="short"),
    ]
    plot, data = marks.single(layers), {"points": _points(curves, bundles), "ends": _ends(curves, bundles)}
    return marks.draw(name, title, setting_lines(view), rows, "", plot, facts, data, omitted=omitted)


def _points(curves: Sequence[tuple[Line, Losses]], bundles: Sequence[Sequence[int]]) -> list[Datum]:
    """Return the points of the curves: those that coincide have dashes, in pixels, that alternate along the way."""
    points = []
    for bundle in bundles:
        for rank, (line, curve) in enumerate(curves[position] for position in bundle):
            dash = [_DASH, _DASH * (len(bundle) - 1)] if len(bundle) > 1 else [1, 0]
            drawn = list(curve.items())
            points += [
                line.datum(x=drawn[at][0], y=drawn[at][1][0], phase=drawn[at][1][1], dash=dash, begin=-_DASH * rank)
                for at in _downsample(len(drawn))
            ]
    return points


def _ends(curves: Sequence[tuple[Line, Losses]], bundles: Sequence[Sequence[int]]) -> list[Datum]:
    """Return the names at the ends of the curves, one for all that coincide; they belong to no strategy."""
    ends = []
    for first, *rest in bundles:
        line, curve = curves[first]
        text = line.label + (f" and {len(rest)} more" if rest else "")
        if rest and len(rest) + 1 == len(curves):
            text = f"{f'all {len(curves)}' if len(rest) > 1 else 'both'} configurations"
        step = max(curve)
        ends.append({"strategy": "", "x": step, "y": curve[step][0], "short": text})
    return ends


def _bundles(curves: Sequence[Losses]) -> list[list[int]]:
    """Return the positions of curves in groups of those that coincide with the first of the group."""
    bundles: list[list[int]] = []
    for position, curve in enumerate(curves):
        own = next((bundle for bundle in bundles if _coincide(curves[bundle[0]], curve)), None)
        if own is None:
            bundles.append([position])
        else:
            own.append(position)
    return bundles


def _coincide(first: Losses, second: Losses) -> bool:
    shared = first.keys() & second.keys()
    return all(abs(first[step][0] - second[step][0]) <= _COINCIDE * abs(first[step][0]) for step in shared)
