"""The report's section on activations: how what is held for backward grows with the micro-batch."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from harness.records.schema import Record
from harness.report import frame
from harness.report.charts import memory as charts
from harness.report.document import BulletList, Section, Table, section
from harness.report.labels import VARYING
from harness.report.view import View

# Runs that differ in the micro-batch alone, and in the batch and accumulation that follow from it, are one line of the
# picture; those of one line and its checkpointed twin differ in checkpointing too.
_LINE = ("strategy", "parameters", *(name for name in VARYING if name not in ("micro_batch", "global_batch")))

Key = tuple[Any, ...]

Points = dict[int, tuple[float, float | None]]  # measured and predicted bytes by micro-batch


def batches(view: View) -> list[Section]:
    """A row a micro-batch of every line with several of them, and what each line says."""
    lines = {key: points for key, points in _lines(view.median_runs.records).items() if len(points) > 1}
    if not lines:
        return []
    names = _names(list(lines))
    unit = frame.byte_unit([size for points in lines.values() for pair in points.values() for size in pair])
    rows = [
        (names[key], micro_batch, *points[micro_batch])
        for key, points in lines.items()
        for micro_batch in sorted(points)
    ]
    measured, predicted = [row[2] for row in rows], [row[3] for row in rows]
    columns = {
        "run": [row[0] for row in rows],
        "micro-batch": [str(row[1]) for row in rows],
        f"measured {unit.name}": frame.scaled(measured, unit),
        f"predicted {unit.name}": frame.scaled(predicted, unit),
        "measured/predicted": frame.ratios([m / p if p else None for m, p in zip(measured, predicted, strict=True)]),
    }
    return section(
        "Activation memory against micro-batch",
        charts.batches(view),
        Table(list(columns), list(zip(*columns.values(), strict=True))),
        BulletList([("", sentence) for sentence in _sentences(lines, names)]),
    )


def _lines(records: Sequence[Record]) -> dict[Key, Points]:
    """The points of every line by its key, whose last entry is the checkpointing; of equal points the first."""
    found: dict[Key, Points] = {}
    for record in records:
        row, config = record["row"], record.get("config") or {}
        if row["status"] != "ok" or not row.get("activation_bytes") or not row.get("micro_batch"):
            continue
        groups = (repr(config.get("model")), repr(config.get("strategy")))  # sizes, options
        key = (*(row.get(name) for name in _LINE), *groups, row.get("checkpointing"))
        point = (row["activation_bytes"], row.get("predicted_activation_bytes"))
        found.setdefault(key, {}).setdefault(row["micro_batch"], point)
    return found


def _names(keys: Sequence[Key]) -> dict[Key, str]:
    """What tells the lines apart: strategy, checkpointing, and of the rest what varies."""
    named = (*_LINE, "", "", "checkpointing")
    always = [named.index("strategy"), named.index("checkpointing")]
    varying = [place for place, name in enumerate(named) if name and len({key[place] for key in keys}) > 1]
    return {
        key: " ".join(
            [f"{key[place]}" for place in always]
            + [f"{named[place]} {key[place]}" for place in varying if place not in always and key[place] is not None]
        )
        for key in keys
    }


def _sentences(lines: dict[Key, Points], names: dict[Key, str]) -> Iterator[str]:
    """How many bytes a sequence adds, and what checkpointing takes off that and off the largest."""
    for key, points in lines.items():
        slope = _slope(points)
        text = f"{names[key]}: a sequence more in the micro-batch adds {_size(slope)}"
        plain = lines.get((*key[:-1], "none"), {})
        shared = sorted(points.keys() & plain.keys())
        if key[-1] != "none" and shared and slope > 0:
            before, largest = _slope(plain), shared[-1]
            saved = 1 - points[largest][0] / plain[largest][0]
            text += (
                f", {before / slope:.1f} times less than the {_size(before)} without checkpointing; at micro-batch"
                f" {largest} that saves {saved:.0%}"
            )
        yield text + "."


def _slope(points: Points) -> float:
    """Bytes a sequence, by least squares."""
    return statistics.linear_regression(list(points), [measured for measured, _ in points.values()]).slope


def _size(number: float) -> str:
    unit = frame.byte_unit([number])
    return f"{frame.scaled([number], unit)[0]} {unit.name}"
