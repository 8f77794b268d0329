"""The charts of losses over steps."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from harness.records.run_folder import RunFolder
from harness.report.charts import marks
from harness.report.charts.curves import ONE_OF_EACH, select
from harness.report.charts.marks import Field, Plot, Rows, axis, column, spanning
from harness.report.charts.setting import model_name
from harness.report.comparability import comparability_key, group_by
from harness.report.document import Chart
from harness.report.lines import Datum, Line
from harness.report.sentences import labels_text
from harness.report.text import at_most
from harness.report.view import View
from harness.util.text import join_words, sanitize

_DASH = 10  # pixels

_COINCIDE = 1e-3  # relative

_POINTS = 240  # of one curve

_MOST = 24  # curves of one chart, most of which coincide

_COLUMNS = 8  # steps of the table of losses


def losses(view: View) -> list[Chart]:
    """Draw the losses of the median repeat of every line, one chart for each training: model, precision and batch."""
    trainings = group_by([line for line in view.lines if line.ok], lambda line: comparability_key(line.row))
    charts: list[Chart] = []
    for lines in trainings.values():
        curves = {line: curve for line in select(lines, _MOST) if len(curve := _curve(view, line))}
        if curves:
            name = f"losses-{len(charts) + 1}" if charts else "losses"
            title = "Training loss by step" + (f": {_training(lines[0])}" if len(trainings) > 1 else "")
            charts.append(_chart(view, name, title, list(curves), list(curves.values()), len(lines)))
    return charts


def _curve(view: View, line: Line) -> pd.DataFrame:
    """Return x, y and phase, the steps and losses of a line's median run; no rows where they are not on file."""
    names = {"step": "x", "loss": "y", "phase": "phase"}
    try:
        file = RunFolder(view.folders[line.median_run.run_id]).steps
        steps = pd.read_json(file, lines=True, precise_float=True)[list(names)].rename(columns=names)
        curve: pd.DataFrame = steps[np.isfinite(steps["y"])].astype({"x": int, "y": float})
    except (KeyError, OSError, ValueError, TypeError):  # there is no such file, or it is damaged
        return pd.DataFrame()
    return curve.assign(phase=curve["phase"].map(sanitize))


def _training(line: Line) -> str:
    row = line.row
    tokens = f"{row.get('global_batch')} × {row.get('seq_len')} tokens"
    return sanitize(f"{model_name(line.record)}, {row.get('precision')}, {tokens}")


def _chart(
    view: View, name: str, title: str, lines: Sequence[Line], curves: Sequence[pd.DataFrame], total: int
) -> Chart:
    table = pd.concat([curve.set_index("x")["y"] for curve in curves], axis=1, keys=range(len(curves))).sort_index()
    steps = table.index.tolist()
    last = table.ffill().iloc[-1].tolist()
    fields = {"last": Field("", last, [f"{loss:.6g}" for loss in last])}
    for step, at_step in _thinned(table, _COLUMNS).iterrows():
        cells = ["" if np.isnan(loss) else f"{loss:.7f}" for loss in at_step]
        fields[f"loss at step {step}"] = column(f"loss at step {step}", cells)
    apart = (table.max(axis=1) - table.min(axis=1)).max()
    title_x = f"step (losses at the same step differ by at most {apart:.2g})" if len(lines) > 1 else "step"
    x = axis(title_x, (steps[0], steps[-1]), form="d")
    y = spanning("loss", [loss for curve in curves for loss in curve["y"]])
    plot = Plot(view, Rows(lines, fields), x, y)
    exact = marks.tooltip(("label", "run", ""), ("x", "step", ",d"), ("y", "loss", ".7f"), ("phase", "phase", ""))
    layers = [
        plot.mark("line dashed", data="points", tooltip=exact, detail="label"),
        plot.mark("text ending", data="ends", text="short"),
    ]
    points: list[Datum] = []
    ends: list[Datum] = []
    for bundle in group_by(range(len(lines)), lambda place: _first_equal(table, place)).values():
        points += _points([(lines[place], curves[place]) for place in bundle])
        ends.append(_end([lines[place] for place in bundle], len(lines), curves[bundle[0]]))
    return marks.draw(
        view,
        name,
        title,
        plot.rows,
        "",
        marks.single(layers),
        {"steps": max(map(len, curves)), "apart": apart},
        {"points": points, "ends": ends},
        rule=ONE_OF_EACH,
        total=total,
    )


def _thinned(table: pd.DataFrame, most: int) -> pd.DataFrame:
    """Return at most so many rows, evenly spaced, the first and the last among them."""
    return table.iloc[np.linspace(0, len(table) - 1, min(len(table), most), dtype=int)]


def _first_equal(table: pd.DataFrame, place: int) -> int:
    """Return the first curve that coincides with the curve at a place, which may be that one itself."""
    bound = _COINCIDE * table[place].abs()
    return next(first for first in range(place + 1) if not ((table[first] - table[place]).abs() > bound).any())


def _points(bundle: Sequence[tuple[Line, pd.DataFrame]]) -> list[Datum]:
    """Return the points of curves that coincide: their dashes, in pixels, alternate along the way."""
    points = []
    for rank, (line, curve) in enumerate(bundle):
        dash = {"dash": [_DASH, _DASH * (len(bundle) - 1)], "begin": -_DASH * rank}
        drawn = _thinned(curve, _POINTS).itertuples(index=False)
        points += [line.datum(x=x, y=y, phase=phase, **dash) for x, y, phase in drawn]
    return points


def _end(bundle: Sequence[Line], total: int, curve: pd.DataFrame) -> Datum:
    """Return the name at the end of curves that coincide; it belongs to no strategy."""
    labels = [line.label for line in bundle]
    short = labels_text(labels, total, 1) if len(labels) == total else join_words(at_most(labels, 1))
    return {"strategy": "", "x": int(curve["x"].iloc[-1]), "y": float(curve["y"].iloc[-1]), "short": short}
