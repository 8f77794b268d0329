"""Charts of what is measured beside what is expected: peaks, bytes, figures of papers, and losses, which coincide."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from harness.records.run_folder import RunFolder
from harness.report.charts.bars import bars, ordered
from harness.report.charts.curves import ONE_OF_EACH, Points, select
from harness.report.charts.marks import Plot, axis, draw, single, spanning
from harness.report.charts.rows import Field, Rows, column, figures, numbers, tooltip, unseen, words
from harness.report.claims import Claim
from harness.report.comparability import EQUAL_BYTES, comparability_key, group_by, is_measured
from harness.report.document import Chart
from harness.report.lines import Datum, Item, Line, finite_number
from harness.report.text import at_most, byte_unit, format_numbers, labels_text
from harness.report.view import View, model_name
from harness.util.text import join_words, sanitize


def predicted(view: View) -> Chart | None:
    """Draw the predicted peak against the measured one; on the diagonal they are equal."""
    lines = [line for line in view.lines if line.peak and line.number("predicted_peak_bytes") and is_measured(line.row)]
    if not lines:
        return None
    planned, measured = [line.row["predicted_peak_bytes"] for line in lines], [line.peak for line in lines]
    unit = byte_unit([*planned, *measured])
    errors = [100 * (size / peak - 1) for size, peak in zip(planned, measured, strict=True)]
    least = max(_LEAST_ERROR, sorted(map(abs, errors))[-_MOST_LABELS:][0])
    fields = {
        "x": numbers("predicted peak memory", planned, unit),
        "y": numbers("measured peak memory", measured, unit),
        "error": figures("error (%)", errors, "+.2f"),
        "name": unseen([line.label if abs(error) >= least else "" for line, error in zip(lines, errors, strict=True)]),
    }
    both = [*fields["x"].values, *fields["y"].values]
    x, y = (spanning(fields[name].title, both) for name in ("x", "y"))
    plot = Points(view, Rows(lines, fields), x, y)
    ends = [{"strategy": "", "x": end, "y": end} for end in plot.x["scale"]["domain"]]
    data = {"ends": ends, "labels": plot.placed(plot.rows.data, [ends])}
    layers = single([plot.mark("line reference", data="ends"), plot.mark("point"), *plot.labels("labels")])
    return draw(view, "predicted", "Predicted and measured peak memory", plot.rows, "error", layers, data=data)


_MOST_LABELS, _LEAST_ERROR = 6, 1.0  # labels of a chart of predictions, of errors of at least so many percent


def traffic(view: View) -> Chart | None:
    """Draw the bytes that the rank that sends most sends along each mesh axis, the fewest first.

    There is no chart where all send the same. Ticks of the formula stand where the bytes differ from it.
    """
    lines = ordered(view.lines, lambda line: sum(sent for _, sent, _ in _entries(line)))
    entries = [(line, *entry) for line in lines if line.ok for entry in _entries(line)]
    if not entries:
        return None
    owners, axes, sizes, formulas = zip(*entries, strict=True)
    if max(sizes) - min(sizes) <= EQUAL_BYTES * max(sizes):
        return None
    differs = [due is not None and abs(sent - due) > EQUAL_BYTES * due for *_, sent, due in entries]
    unit = byte_unit([*sizes, *formulas])
    fields = {
        "axis": words("mesh axis", axes),
        "value": numbers("sent", sizes, unit),
        "formula": numbers("formula", formulas, unit),
        "differs": unseen(differs),
        "total": unseen([max(sent, due or 0.0) / unit.size for *_, sent, due in entries]),
        "shown": unseen(format_numbers(sizes, unit)),
        "bar": unseen([f"{line.label} · {axis}" if len(set(axes)) > 1 else line.label for line, axis, *_ in entries]),
    }
    items = [replace(line, position=rank) for rank, line in enumerate(owners)]
    plot = bars(view, items, fields, axis(f"sent per step ({unit.name}{'; | = formula' * any(differs)})"))
    layers = [plot.mark("bar", "value", "bar"), plot.mark("tick formula", "formula", "bar", "datum.differs")]
    return plot.chart(
        "traffic",
        "Bytes sent by mesh axis",
        "value",
        layers,
        facts={"axes": dict.fromkeys(axes), "differs": any(differs)},
    )


def _entries(line: Line) -> list[tuple[str, float, float | None]]:
    """Return each mesh axis, the bytes that a rank sends along it in a step, and the formula's."""
    return [
        (sanitize(entry.get("axis") or ""), sent, finite_number(entry.get("formula_bytes")))
        for entry in line.median_run.traffic
        if (sent := finite_number(entry.get("bytes"))) is not None
    ]


def measured_against_papers(view: View, claims: Sequence[Claim]) -> Chart | None:
    """Draw each claim's figure at this layout and the measured one on one row, those that are farthest apart first."""
    known = sorted((claim for claim in claims if claim.expected > 0 and claim.measured > 0), key=_apart, reverse=True)
    if not known:
        return None
    strategies = {line.label: line.strategy for line in view.lines}
    items = [
        Item(f"{claim.label}: {claim.subject}", strategies.get(claim.label, ""), place)
        for place, claim in enumerate(known)
    ]
    fields = {
        "expected": figures("paper at this layout", [claim.expected for claim in known], ".3~g"),
        "measured": figures("measured", [claim.measured for claim in known], ".3~g"),
        "apart": figures("difference (%)", [100 * (claim.measured / claim.expected - 1) for claim in known], "+.1f"),
    }
    ends = [*fields["expected"].values, *fields["measured"].values]
    x = axis("× (◇ paper, ● measured)", (min(ends) / 1.2, max(ends) * 1.2), is_log=True)
    plot = bars(view, items, fields, x, noun="claim")
    layers = [
        plot.mark("rule quiet", "expected", "bar", x2="measured"),
        plot.mark("point paper", "expected", "bar"),
        plot.mark("point", "measured", "bar"),
    ]
    return plot.chart(
        "papers",
        "Measured against the papers",
        "apart",
        layers,
        margin=0,
        facts={"agreeing": sum(claim.agrees for claim in known), "factor": _apart(known[0])},
    )


def _apart(claim: Claim) -> float:
    ratio = claim.measured / claim.expected
    return max(ratio, 1 / ratio)


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
            charts.append(_chart(view, name, title, curves, len(lines)))
    return charts


def _curve(view: View, line: Line) -> pd.DataFrame:
    """Return the step, the loss and the phase of each step of a line's median run; no rows where none are on file."""
    try:
        file = RunFolder(view.folders[line.median_run.run_id]).steps
        steps = pd.read_json(file, lines=True, precise_float=True)[["step", "loss", "phase"]]
        curve: pd.DataFrame = steps[np.isfinite(steps["loss"])].astype({"step": int, "loss": float})
    except (KeyError, OSError, ValueError, TypeError):  # there is no such file, or it is damaged
        return pd.DataFrame()
    return curve.assign(phase=curve["phase"].map(sanitize))


def _training(line: Line) -> str:
    row = line.row
    return sanitize(f"{model_name(line.record)}, {row['precision']}, {row['global_batch']} × {row['seq_len']} tokens")


def _chart(view: View, name: str, title: str, curves: Mapping[Line, pd.DataFrame], total: int) -> Chart:
    table = pd.concat({line: curve.set_index("step")["loss"] for line, curve in curves.items()}, axis=1).sort_index()
    steps, last = table.index.tolist(), table.ffill().iloc[-1].tolist()
    titled = {f"loss at step {step}": at_step for step, at_step in _thinned(table, _COLUMNS).iterrows()}
    fields = {
        "last": Field("", last, [f"{loss:.6g}" for loss in last]),
        **{
            title: column(title, ["" if np.isnan(loss) else f"{loss:.7f}" for loss in at_step])
            for title, at_step in titled.items()
        },
    }
    apart = (table.max(axis=1) - table.min(axis=1)).max()
    title_x = f"step (losses at the same step differ by at most {apart:.2g})" if len(curves) > 1 else "step"
    plot = Plot(
        view,
        Rows(list(curves), fields),
        axis(title_x, (steps[0], steps[-1]), format="d", tickMinStep=1),
        spanning("loss", [loss for curve in curves.values() for loss in curve["loss"]]),
    )
    exact = tooltip(("label", "run", ""), ("step", "step", ",d"), ("loss", "loss", ".7f"), ("phase", "phase", ""))
    layers = [
        plot.mark("line dashed", "step", "loss", data="points", tooltip=exact, detail="label"),
        plot.mark("text ending", "step", "loss", data="ends", text="short"),
    ]
    bundles = group_by(curves, lambda line: _first_equal(table, line)).values()
    data = {
        "points": [point for bundle in bundles for point in _points(bundle, curves)],
        "ends": [_end(bundle, table) for bundle in bundles],
    }
    return draw(
        view,
        name,
        title,
        plot.rows,
        "",
        single(layers),
        {"steps": max(map(len, curves.values())), "apart": apart},
        data,
        rule=ONE_OF_EACH,
        total=total,
    )


def _thinned(table: pd.DataFrame, most: int) -> pd.DataFrame:
    """Return at most so many rows, evenly spaced, the first and the last among them."""
    return table.iloc[np.linspace(0, len(table) - 1, min(len(table), most), dtype=int)]


def _first_equal(table: pd.DataFrame, line: Line) -> object:
    """Return the first line whose losses coincide with those of a line, which may be that one itself."""
    bound = _COINCIDE * table[line].abs()
    return next(first for first in table if not ((table[first] - table[line]).abs() > bound).any())


def _points(bundle: Sequence[Line], curves: Mapping[Line, pd.DataFrame]) -> list[Datum]:
    """Return the points of curves that coincide: their dashes, in pixels, alternate along the way."""
    points = []
    for rank, line in enumerate(bundle):
        dash = {"dash": [_DASH, _DASH * (len(bundle) - 1)], "begin": -_DASH * rank}
        drawn = _thinned(curves[line], _POINTS).itertuples(index=False)
        points += [line.datum(step=step, loss=loss, phase=phase, **dash) for step, loss, phase in drawn]
    return points


def _end(bundle: Sequence[Line], table: pd.DataFrame) -> Datum:
    """Return the name at the end of curves that coincide; it belongs to no strategy."""
    *_, (step, loss) = table[bundle[0]].dropna().items()
    labels = [line.label for line in bundle]
    short = labels_text(labels, len(labels), 1) if len(labels) == table.shape[1] else join_words(at_most(labels, 1))
    return {"strategy": "", "step": step, "loss": loss, "short": short}
