"""The curves that charts draw: lines of a report that differ in one quantity alone, and losses by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.strategy import DEGREES
from harness.report.comparability import curve_columns, curve_key, group_by
from harness.report.labels import VARYING, configuration_name, value_text
from harness.report.lines import Item, Line
from harness.util.text import sanitize

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
    batches = ((), BATCH_COLUMNS[:1], BATCH_COLUMNS[1:], BATCH_COLUMNS)
    attempts = (_group(ok, "world_size", (*_DEGREES, *free)) for free in batches)
    return next(filter(None, attempts), [])


def by_micro_batch(lines: Sequence[Line]) -> list[Series]:
    """Return the curves of activation memory over the micro-batch."""
    ok = [line for line in lines if line.ok and line.number("activation_bytes") and line.number("micro_batch")]
    return _group(ok, "micro_batch", BATCH_COLUMNS)


def by_parameters(lines: Sequence[Line]) -> list[Series]:
    """Return the curves of peak memory over the model's size; lines that ran out of memory are points too."""
    known = [line for line in lines if line.status in ("ok", "oom") and line.number("parameters")]
    return _group(known, "parameters", _SIZES)


def _group(lines: Sequence[Line], name: str, free: Sequence[str]) -> list[Series]:
    """Return the series over a column with more than one point; the first of several lines at a point counts."""
    columns = curve_columns(free)
    settings = group_by(lines, lambda line: tuple(map(line.row.get, columns))).values()
    varied = {
        line.position for members in settings if len({line.number(name) for line in members}) > 1 for line in members
    }
    known = [line for line in lines if line.position in varied]  # others are alone, whatever their options are
    curves = {}
    for key, members in group_by(known, lambda line: curve_key(line.row, line.record.config, free)).items():
        points = {line.number(name) or 0.0: line for line in reversed(members)}
        if len(points) > 1:
            curves[key] = [points[value] for value in sorted(points)]
    names = _names(list(curves), columns)
    return [
        Series(label, points[0].strategy, position, points)
        for position, (label, points) in enumerate(zip(names, curves.values(), strict=True))
    ]


def _names(keys: Sequence[tuple[Any, ...]], columns: Sequence[str]) -> list[str]:
    """Return a unique name for each curve.

    It consists of strategy and checkpointing, what distinguishes the curve from others of these two, and a number
    where that is not enough.
    """
    names: list[str] = []
    for key in keys:
        namesakes = [other for other in keys if other[:2] == key[:2]]
        varying = [
            position
            for position, name in enumerate(columns)
            if name in VARYING and len({other[position] for other in namesakes}) > 1
        ]
        words = [configuration_name(key[0], key[1])]
        words += [value_text(columns[position], key[position]) for position in varying if key[position] is not None]
        name = sanitize(" ".join(words))
        names.append(f"{name} ({len(names) + 1})" if name in names else name)
    return names
