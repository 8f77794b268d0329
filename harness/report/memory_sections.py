"""The report's sections on memory: the maximum of each kind, and what fills the peak, and how activations grow."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from harness.cost_model.parts import PEAK_TITLES
from harness.records.schema import COLUMNS, Record
from harness.report.charts import memory as charts
from harness.report.charts import memory as memory_charts
from harness.report.charts.curves import BATCH_COLUMNS, Series, by_micro_batch
from harness.report.columns import ShownColumn, from_lines, line_table, table_of
from harness.report.comparability import curve_key
from harness.report.document import BulletList, Paragraph, Section, bullets, section
from harness.report.lines import MEMORY_COLUMNS, Line, baseline_name, column_values
from harness.report.text import bytes_text, sentence
from harness.report.view import View

_ON_HOST = ("offloaded_bytes", "offloaded_activation_bytes")  # shown only where one has a value

# Columns beside the parts of memory; the registry does not have the last three.
_OTHER_MEMORY = {
    "peak_reserved_bytes": COLUMNS["peak_reserved_bytes"].title,
    "fragmentation_bytes": "fragmentation",
    "non_torch_bytes": "not allocated by torch",
    "peak_rss_bytes": "host process",
}

_DETAILED = ("gathered", "communication", "temporary")

_LARGEST = 3  # blocks of a run that are listed


def memory(view: View) -> list[Section]:
    """Return the section on memory: the maximum over ranks and repeats of each kind, and over the baseline's."""
    lines = view.lines
    on_host = [name for name in _ON_HOST if any(column_values(lines, name))]
    compared = baseline_name(lines)
    ratios = [from_lines(lines, f"{name}_ratio", f"× {COLUMNS[name].title}", "ratio") for name in MEMORY_COLUMNS]
    parts = zip((from_lines(lines, name) for name in MEMORY_COLUMNS), ratios, strict=True)
    columns = [
        *(shown for size, ratio in parts for shown in ((size, ratio) if compared else (size,))),
        ShownColumn("smallest peak of any rank", [_least_peak(line) for line in lines], "bytes"),
        *(from_lines(lines, name) for name in on_host),
        *(from_lines(lines, name, header) for name, header in _OTHER_MEMORY.items()),
    ]
    sizes = line_table(lines, columns)
    if sizes is None:
        return []
    has_process = any(column_values(lines, "peak_rss_bytes"))
    return section(
        f"Memory ({sizes.unit})",
        sizes,
        Paragraph(sentence("memory_note", has_host_process=has_process, known=on_host, baseline=compared)),
    )


def _least_peak(line: Line) -> int | None:
    """Return the smallest peak of any rank in any repeat, if all of them are recorded."""
    peaks = [rank.peak_allocated_bytes for run in line.runs if run.status == line.status for rank in run.ranks]
    known = [peak for peak in peaks if peak is not None]
    return min(known) if known and len(known) == len(peaks) else None


def peak(view: View) -> list[Section]:
    """Return the section on what fills the peak of the rank with the largest one.

    It has a column for each part and lists the largest blocks that are neither model state nor activations.
    """
    lines = view.peak_runs
    columns = [from_lines(lines, f"at_peak_{part}_bytes", title) for part, title in PEAK_TITLES.items()]
    columns = [column for column in columns if any(column.cells)]
    phases = ShownColumn("phase", column_values(lines, "peak_phase"), number=False)
    parts = line_table(lines, [phases, *columns, from_lines(lines, "peak_allocated_bytes")]) if columns else None
    if parts is None:
        return []
    largest = [(line.label, text) for line in lines if (text := _largest(line.record))]
    blocks = [
        Paragraph(sentence("largest_note")),
        BulletList(largest),
    ]
    return section(
        f"Breakdown of peak memory ({parts.unit})",
        memory_charts.peak(view),
        parts,
        Paragraph(sentence("peak_note")),
        *(blocks if largest else ()),
    )


def _largest(record: Record) -> str:
    peak_rank = record.row.get("peak_rank")
    peaks = [rank.profiled.at_peak for rank in record.ranks if rank.rank == peak_rank]
    parts = [part for at_peak in peaks if at_peak for part in at_peak.parts if part.role in _DETAILED]
    largest = sorted(parts, key=lambda part: -part.bytes)[:_LARGEST]
    return ", ".join(f"{part.what} {bytes_text(part.bytes)}" for part in largest)


def batches(view: View) -> list[Section]:
    """Return a table with a row for each micro-batch of every curve, and a sentence on each curve."""
    curves = by_micro_batch(view.median_runs)
    if not curves:
        return []
    points = [line.row for curve in curves for line in curve.points]
    pairs = [(row["activation_bytes"], row.get("predicted_activation_bytes")) for row in points]
    columns = [
        ShownColumn("run", [curve.label for curve in curves for _ in curve.points], number=False),
        ShownColumn(COLUMNS["micro_batch"].title, [row["micro_batch"] for row in points]),
        ShownColumn("measured {unit}", [measured for measured, _ in pairs], "bytes"),
        ShownColumn("predicted {unit}", [predicted for _, predicted in pairs], "bytes"),
        ShownColumn("measured / predicted", [m / p if p else None for m, p in pairs], "ratio"),
    ]
    sentences = bullets(_sentences(curves))
    return section("Activation memory by micro-batch size", charts.batches(view), table_of(columns), sentences)


def _sentences(curves: Sequence[Series]) -> Iterator[str]:
    """Yield how many bytes each sequence adds, and how much checkpointing saves of that and at the largest batch."""
    by_key = {
        _key(curve): {line.row["micro_batch"]: line.row["activation_bytes"] for line in curve.points}
        for curve in curves
    }
    for curve, (key, sizes) in zip(curves, by_key.items(), strict=True):
        strategy, checkpointing, *others = key
        slope, plain = _slope(sizes), by_key.get((strategy, "none", *others), {})
        shared = sizes.keys() & plain.keys()
        before = largest = saved = None
        if checkpointing != "none" and shared and slope > 0:
            before, largest = _slope(plain), max(shared)
            saved = 1 - sizes[largest] / plain[largest]
        yield sentence("batch_slope", name=curve.label, slope=slope, before=before, largest=largest, saved=saved)


def _key(curve: Series) -> tuple[Any, ...]:
    """Return what the points of a curve share: the strategy, the checkpointing, and all else but the batch."""
    return curve_key(curve.points[0].row, curve.points[0].record.config, BATCH_COLUMNS)


def _slope(sizes: dict[int, int]) -> float:
    """Return the bytes that each sequence adds, by least squares."""
    return statistics.linear_regression(list(sizes), list(sizes.values())).slope
