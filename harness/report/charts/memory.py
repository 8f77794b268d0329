"""Charts of memory: the parts of the peak, the predicted peak, and activations over the micro-batch."""

from collections.abc import Sequence
from dataclasses import replace

from harness.cost_model.parts import PEAK_TITLES
from harness.report.charts.bars import bars, endings, ordered, row_fields
from harness.report.charts.curves import Curves, by_micro_batch, by_parameters, curve_points
from harness.report.charts.marks import axis
from harness.report.charts.rows import Rows, column, figures, numbers, scaled, tooltip, unseen
from harness.report.document import Chart
from harness.report.lines import Datum, Line, finite_number
from harness.report.text import Unit, byte_unit, bytes_text, format_numbers
from harness.report.view import View
from harness.util.text import join_words

_TOTAL, _UNDIVIDED, _LIMIT = "peak memory", "no breakdown recorded", "memory limit"

_FARTHEST = 4.0  # times the highest peak: a limit beyond is mentioned and not drawn, as bars would be too short


def peak(view: View) -> Chart | None:
    """Draw the parts of the peak memory of every line, the smallest peak first, and the device's limit."""
    lines = ordered(view.lines, lambda line: line.peak)
    peaks = [line.peak for line in lines]
    highest = max(filter(None, peaks), default=0.0)
    if not highest:
        return None
    unit, limits = byte_unit(peaks), _limits(lines)
    near = [limit for limit in limits if limit <= _FARTHEST * highest]

    def beside(value: float) -> float:
        """Return where a bar's figure begins: at its end, or at the limit that would cross it."""
        return next((limit for limit in near if value <= limit < value + 0.18 * highest), value)

    parts = row_fields([_peak_parts(line) for line in lines], unit)
    fields = {
        "status": column("status", [line.status for line in lines], True),
        **parts,
        **endings(lines, is_timed=False),
        "total": unseen([value and beside(value) / unit.size for value in peaks]),
        "shown": unseen(format_numbers(peaks, unit)),
    }
    plot = bars(view, lines, fields, axis(parts[_TOTAL].title))
    layers = [
        plot.stack((*PEAK_TITLES.values(), _UNDIVIDED), unit, ("value", unit.name, ",.4~f"), ("exact", "bytes", ",d")),
        plot.mark("rule limit", "limit", None, data="limits", tooltip=tooltip(("shown", "device", ""))),
        plot.mark("text top", "limit", {"value": 0}, data="limits", text="shown"),
    ]
    return plot.chart(
        "peak",
        "Breakdown of peak memory",
        _TOTAL,
        layers,
        data={"limits": _rules(near, unit)},
        facts={"limits": limits, "is_near": bool(near)},
    )


def _peak_parts(line: Line) -> dict[str, float | None]:
    """Return the parts of a peak by their titles, or the whole peak if they are not known; the peak; and the limit."""
    row = line.peak_run.row if line.ok else {}
    parts = {title: finite_number(row.get(f"at_peak_{part}_bytes")) or None for part, title in PEAK_TITLES.items()}
    whole = None if any(parts.values()) else finite_number(row.get("peak_allocated_bytes"))
    return parts | {_UNDIVIDED: whole, _TOTAL: line.peak, _LIMIT: line.number("memory_limit_bytes")}


def _limits(lines: Sequence[Line]) -> list[float]:
    return sorted({limit for line in lines if (limit := line.number("memory_limit_bytes"))})


def _rules(limits: Sequence[float], unit: Unit) -> list[Datum]:
    """Return the data of lines at the memory limits of devices."""
    return [{"strategy": "", "limit": size / unit.size, "shown": f"memory limit {bytes_text(size)}"} for size in limits]


def batches(view: View) -> Chart | None:
    """Draw the measured and the predicted activation memory over the micro-batch."""
    series = by_micro_batch(view.lines)
    if not series:
        return None
    curves, lines = zip(*curve_points(series), strict=True)
    sizes = [line.row["micro_batch"] for line in lines]
    measured, planned = (
        [line.number(name) for line in lines] for name in ("activation_bytes", "predicted_activation_bytes")
    )
    heights = [*measured, *planned]
    unit = byte_unit(heights)
    fields = {
        "x": figures("micro-batch size (sequences)", sizes, ",d"),
        "y": numbers("measured", measured, unit),
        "predicted": numbers("predicted", planned, unit),
    }
    x = axis("micro-batch (sequences)", (0, max(sizes) * 1.03), values=sorted(set(sizes)), format="d")
    y = axis(f"activations ({unit.name})", (0, 1.05 * max(filter(None, heights)) / unit.size))
    plot = Curves(view, Rows(curves, fields), x, y)
    return plot.chart(
        "batches",
        "Activation memory by micro-batch size (×: predicted)",
        "y",
        len(series),
        above=[plot.mark("text predicted", y="predicted", text={"value": "×"})],
    )


_ROOM = 150  # pixels behind the longest bar for the size that did not fit


def memory_wall(view: View) -> Chart | None:
    """Draw peak memory over the model's parameters, the limit, and where strategies ran out of memory."""
    series = by_parameters(view.lines)
    if not series:
        return None
    curves, lines = zip(*curve_points(series), strict=True)
    peaks, sizes, limits = [line.peak for line in lines], [_millions(line) for line in lines], _limits(lines)
    unit = byte_unit(peaks)
    fields = {
        "status": column("status", [line.status for line in lines], True),
        "x": figures("parameters (millions)", sizes, ",.3f"),
        "y": numbers("peak memory", peaks, unit),
        "failed": unseen([None if line.ok else scaled(line.number("memory_limit_bytes"), unit) for line in lines]),
    }
    margin = 0.03 * (max(sizes) - min(sizes))
    x = axis("parameters (millions)", (min(sizes) - margin, max(sizes) + margin))
    y = axis(fields["y"].title, (0.0, 1.1 * max(filter(None, [*peaks, *limits])) / unit.size))
    plot = Curves(view, Rows(curves, fields), x, y)
    above = [
        plot.mark("rule limit", None, "limit", data="limits"),
        plot.mark("text above", {"value": 4}, "limit", data="limits", text="shown"),
        plot.mark("text failed", y="failed", text={"value": "×"}),
    ]
    return plot.chart(
        "wall",
        "Peak memory by model size (×: out of memory)",
        "y",
        len(series),
        above=above,
        data={"limits": _rules(limits, unit)},
        facts={"failed": sum(not line.ok for line in lines)},
    )


def largest_model(view: View) -> Chart | None:
    """Draw the largest model that each configuration trained, the largest first, if some ran out of memory."""
    series = by_parameters(view.lines)
    lines = [line for curve in series for line in curve.points]
    if not any(line.status == "oom" for line in lines):
        return None
    largest = {curve.label: max((_millions(line) for line in curve.points if line.ok), default=0.0) for curve in series}
    curves = sorted(series, key=lambda curve: -largest[curve.label])
    ran = sorted(largest.values(), reverse=True)
    failed = [min((_millions(line) for line in curve.points if not line.ok), default=None) for curve in curves]
    texts = [f" (not {size:,.2f})" if size else "" for size in failed]
    fields = {
        "value": figures("largest that ran (millions of parameters)", ran, ",.3f"),
        "failed": figures("smallest that did not fit", failed, ",.3f"),
        "total": unseen(ran),
        "shown": unseen([f"{size:,.2f}{text}" for size, text in zip(ran, texts, strict=True)]),
    }
    items = [replace(curve, position=rank) for rank, curve in enumerate(curves)]
    plot = bars(view, items, fields, axis("parameters of the largest model that ran (millions)"))
    limits = list(dict.fromkeys(map(bytes_text, _limits(lines))))
    within = f" within {join_words(limits)} per rank" if limits else ""
    return plot.chart(
        "largest",
        f"Largest model that fits{within}",
        "value",
        [plot.mark("bar", "value", "bar")],
        _ROOM,
        facts={"within": within},
    )


def _millions(line: Line) -> float:
    return (line.number("parameters") or 0.0) / 1e6
