"""The curves that charts draw: lines of a report that differ in one quantity alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.strategy import DEGREES
from harness.report.comparability import curve_columns, curve_key, group_by
from harness.report.labels import OTHER_OPTIONS, VARYING, labels
from harness.report.lines import Item, Line

# The columns that follow from the number of ranks.
_DEGREES = ("world_size", *DEGREES, "layers_per_stage")

BATCH_COLUMNS = ("micro_batch", "global_batch")

_SIZES = (
    *("parameters", "model", "layers_per_stage", "name", "source", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)


@dataclass(frozen=True)
class Series(Item):
    """The lines that are the points of one curve, in the order of the quantity in which they differ.

    No two series of a chart have the same label.
    """

    points: Sequence[Line]

    @property
    def drawn_speed(self) -> float | None:
        """The speed of the fastest point, None where none is known."""
        return max((line.drawn_speed for line in self.points if line.drawn_speed is not None), default=None)


def by_world(lines: Sequence[Line]) -> list[Series]:
    """Return the curves of speed over ranks, with equal batches if there are such lines, else with any batches."""
    ok = [line for line in lines if line.drawn_speed and line.number("world_size")]
    if not (any_batches := _group(ok, "world_size", (*_DEGREES, *BATCH_COLUMNS))):
        return []  # what is alone with any batch is so with equal ones
    attempts = (_group(ok, "world_size", (*_DEGREES, *free)) for free in ((), BATCH_COLUMNS[:1], BATCH_COLUMNS[1:]))
    return next(filter(None, attempts), any_batches)


def by_micro_batch(lines: Sequence[Line]) -> list[Series]:
    """Return the curves of activation memory over the micro-batch."""
    ok = [line for line in lines if line.ok and line.number("activation_bytes") and line.number("micro_batch")]
    return _group(ok, "micro_batch", BATCH_COLUMNS)


def by_parameters(lines: Sequence[Line]) -> list[Series]:
    """Return the curves of peak memory over the model's size; lines that ran out of memory are points too."""
    known = [line for line in lines if line.status in ("ok", "oom") and line.number("parameters")]
    return _group(known, "parameters", _SIZES)


def _group(lines: Sequence[Line], name: str, free: tuple[str, ...]) -> list[Series]:
    """Return the series over a column with more than one point; the first of several lines at a point counts."""
    settings = group_by(lines, lambda line: tuple(map(line.row.get, curve_columns(free)))).values()
    varied = {line for members in settings if len({line.number(name) for line in members}) > 1 for line in members}
    known = [line for line in lines if line in varied]  # others are alone, whatever their options are
    groups = group_by(known, lambda line: curve_key(line.row, line.record.config, free)).values()
    by_value = [{line.number(name) or 0.0: line for line in reversed(members)} for members in groups]
    curves = [[points[value] for value in sorted(points)] for points in by_value if len(points) > 1]
    rows = [points[0].row | {"run_id": f"({number})", OTHER_OPTIONS: ""} for number, points in enumerate(curves, 1)]
    names = labels(rows, [column for column in VARYING if column not in free])
    return [
        Series(label, points[0].strategy, position, points)
        for position, (label, points) in enumerate(zip(names, curves, strict=True))
    ]
