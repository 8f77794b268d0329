"""The report's section on activations: how the bytes saved for backward grow with the micro-batch."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from harness.records.columns import column
from harness.report.charts import memory as charts
from harness.report.charts.series import BATCH_COLUMNS, Series, by_micro_batch
from harness.report.columns import ShownColumn, table_of
from harness.report.comparability import curve_key
from harness.report.document import Section, bullets, section
from harness.report.sentences import sentence
from harness.report.view import View


def batches(view: View) -> list[Section]:
    """Return a table with a row for each micro-batch of every curve, and a sentence on each curve."""
    curves = by_micro_batch(view.median_runs)
    if not curves:
        return []
    points = [line.row for curve in curves for line in curve.points]
    pairs = [(row["activation_bytes"], row.get("predicted_activation_bytes")) for row in points]
    columns = [
        ShownColumn("run", [curve.label for curve in curves for _ in curve.points], number=False),
        ShownColumn(column("micro_batch").title, [row["micro_batch"] for row in points]),
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
