"""The report's section on activations: how the bytes saved for backward grow with the micro-batch."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from harness.records.columns import column
from harness.records.schema import Record
from harness.report.charts import memory as charts
from harness.report.charts.series import BATCH_COLUMNS
from harness.report.comparability import curve_columns, curve_key
from harness.report.document import Section, Table, bullets, section
from harness.report.labels import configuration_name
from harness.report.sentences import sentence
from harness.report.text import byte_unit, format_numbers, format_ratios
from harness.report.view import View

# Runs of one curve differ in the micro-batch alone, and in the batch and accumulation that follow from it.
_COLUMNS = curve_columns(BATCH_COLUMNS)

_STRATEGY, _CHECKPOINTING = _COLUMNS.index("strategy"), _COLUMNS.index("checkpointing")

Key = tuple[Any, ...]  # as curve_key makes it

Points = dict[int, tuple[float, float | None]]  # measured and predicted bytes by micro-batch


def batches(view: View) -> list[Section]:
    """Return a table with a row for each micro-batch of every curve, and a sentence on each curve."""
    curves = {key: points for key, points in _curves(view.median_runs.records).items() if len(points) > 1}
    if not curves:
        return []
    names = _names(list(curves))
    unit = byte_unit([size for points in curves.values() for pair in points.values() for size in pair])
    rows = [
        (names[key], micro_batch, *points[micro_batch])
        for key, points in curves.items()
        for micro_batch in sorted(points)
    ]
    measured, predicted = [row[2] for row in rows], [row[3] for row in rows]
    columns = {
        "run": [row[0] for row in rows],
        column("micro_batch").title: [str(row[1]) for row in rows],
        f"measured {unit.name}": format_numbers(measured, unit),
        f"predicted {unit.name}": format_numbers(predicted, unit),
        "measured / predicted": format_ratios([m / p if p else None for m, p in zip(measured, predicted, strict=True)]),
    }
    return section(
        "Activation memory by micro-batch size",
        charts.batches(view),
        Table(list(columns), list(zip(*columns.values(), strict=True))),
        bullets(_sentences(curves, names)),
    )


def _curves(records: Sequence[Record]) -> dict[Key, Points]:
    """Return the points of every curve by its key; the first of several runs with the same micro-batch counts."""
    curves: dict[Key, Points] = {}
    for record in records:
        row = record.row
        if row["status"] != "ok" or not row.get("activation_bytes") or not row.get("micro_batch"):
            continue
        key = curve_key(row, record.config, BATCH_COLUMNS)
        point = (row["activation_bytes"], row.get("predicted_activation_bytes"))
        curves.setdefault(key, {}).setdefault(row["micro_batch"], point)
    return curves


def _names(keys: Sequence[Key]) -> dict[Key, str]:
    """Return for each curve its strategy, its checkpointing, and the other columns in which the curves differ."""
    order = [*(position for position in range(len(_COLUMNS)) if position != _CHECKPOINTING), _CHECKPOINTING]
    named = (_STRATEGY, _CHECKPOINTING)
    varying = [position for position in order if position not in named and len({key[position] for key in keys}) > 1]
    return {
        key: " ".join(
            [configuration_name(key[_STRATEGY], key[_CHECKPOINTING])]
            + [f"{_COLUMNS[position]} {key[position]}" for position in varying if key[position] is not None]
        )
        for key in keys
    }


def _sentences(curves: dict[Key, Points], names: dict[Key, str]) -> Iterator[str]:
    """Yield how many bytes each sequence adds, and how much checkpointing saves of that and at the largest batch."""
    for key, points in curves.items():
        slope = _slope(points)
        plain = curves.get((*key[:_CHECKPOINTING], "none", *key[_CHECKPOINTING + 1 :]), {})
        shared = points.keys() & plain.keys()
        before = largest = saved = None
        if key[_CHECKPOINTING] != "none" and shared and slope > 0:
            before, largest = _slope(plain), max(shared)
            saved = 1 - points[largest][0] / plain[largest][0]
        yield sentence("batch_slope", name=names[key], slope=slope, before=before, largest=largest, saved=saved)


def _slope(points: Points) -> float:
    """Return the bytes that each sequence adds, by least squares."""
    return statistics.linear_regression(list(points), [measured for measured, _ in points.values()]).slope
