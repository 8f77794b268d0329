"""Charts of what is measured beside what is expected: of peaks, of bytes sent, and of the figures of papers."""

from collections.abc import Sequence
from dataclasses import replace

from harness.report.charts import marks
from harness.report.charts.bars import bars, ordered
from harness.report.charts.marks import Rows, axis, figures, numbers, spanning, unseen, words
from harness.report.charts.points import Points
from harness.report.claim_peers import Claim
from harness.report.comparability import EQUAL_BYTES, is_measured
from harness.report.document import Chart
from harness.report.lines import Item, Line, finite_number
from harness.report.text import byte_unit, format_numbers
from harness.report.view import View
from harness.util.text import sanitize


def predicted(view: View) -> Chart | None:
    """Draw the predicted peak against the measured one; on the diagonal they are equal."""
    known = [line for line in view.lines if line.peak and is_measured(line.row)]
    lines = [line for line in known if line.number("predicted_peak_bytes")]
    if not lines:
        return None
    planned, measured = [line.number("predicted_peak_bytes") or 0 for line in lines], [line.peak or 0 for line in lines]
    unit = byte_unit([*planned, *measured])
    errors = [100 * (size / peak - 1) for size, peak in zip(planned, measured, strict=True)]
    farthest = sorted(range(len(lines)), key=lambda place: abs(errors[place]))[-_MOST_LABELS:]
    named = [place for place in farthest if abs(errors[place]) >= _LEAST_ERROR]
    fields = {
        "x": numbers("predicted peak memory", planned, unit),
        "y": numbers("measured peak memory", measured, unit),
        "error": figures("error (%)", errors, "+.2f"),
        "name": unseen([line.label if place in named else "" for place, line in enumerate(lines)]),
    }
    rows = Rows(lines, fields)
    both = [*fields["x"].values, *fields["y"].values]
    plot = Points(view, rows, spanning(fields["x"].title, both), spanning(fields["y"].title, both))
    ends = [{"strategy": "", "x": end, "y": end} for end in plot.x["scale"]["domain"]]
    labels = plot.placed(rows.data, [ends])
    layers = marks.single([plot.mark("line reference", data="ends"), plot.mark("point"), plot.labels("labels")])
    name = "Predicted and measured peak memory"
    return marks.draw(view, "predicted", name, rows, "error", layers, data={"ends": ends, "labels": labels})


_MOST_LABELS, _LEAST_ERROR = 6, 1.0  # labels of a chart of predictions, of errors of at least so many percent


def traffic(view: View) -> Chart | None:
    """Draw the bytes that the rank that sends most sends along each mesh axis, the fewest first.

    There is no chart where all send the same. Ticks of the formula stand where the bytes differ from it.
    """
    known = [line for line in view.lines if line.ok and _entries(line)]
    lines = ordered(known, lambda line: sum(sent for _, sent, _ in _entries(line)))
    entries = [(line, *entry) for line in lines for entry in _entries(line)]
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
    facts = {"axes": dict.fromkeys(axes), "differs": any(differs)}
    return plot.chart("traffic", "Bytes sent by mesh axis", "value", layers, facts=facts)


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
    scale = axis("× (◇ paper, ● measured)", (min(ends) / 1.2, max(ends) * 1.2), is_log=True)
    plot = bars(view, items, fields, scale, noun="claim")
    layers = [
        plot.mark("rule quiet", "expected", "bar", x2="measured"),
        plot.mark("point paper", "expected", "bar"),
        plot.mark("point", "measured", "bar"),
    ]
    facts = {"agreeing": sum(claim.agrees for claim in known), "factor": _apart(known[0])}
    return plot.chart("papers", "Measured against the papers", "apart", layers, 0, facts=facts)


def _apart(claim: Claim) -> float:
    ratio = claim.measured / claim.expected
    return max(ratio, 1 / ratio)
