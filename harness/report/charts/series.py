"""The curves that charts draw: lines of a report that differ in one quantity alone, and losses by step."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.strategy import DEGREES
from harness.report.charts.lines import ChartLine, Datum, finite_number, median_record
from harness.report.comparability import curve_columns, curve_key
from harness.report.labels import VARYING, configuration_name, value_text
from harness.report.view import View
from harness.util.text import sanitize

# The columns that follow from the number of ranks.
_DEGREES = ("world_size", *DEGREES, "layers_per_stage")

BATCH_COLUMNS = ("micro_batch", "global_batch")

_SIZES = (
    *("parameters", "model", "layers_per_stage", "name", "source", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)

_POINTS = 240  # of one curve


@dataclass(frozen=True)
class Series:
    """The lines that are the points of one curve, in the order of the quantity in which they differ."""

    name: str  # no two series of a chart have the same
    strategy: str
    position: int
    points: Sequence[ChartLine]

    @property
    def speed(self) -> float | None:
        """The speed of the fastest point."""
        return max((line.speed for line in self.points if line.speed is not None), default=None)

    def datum(self, **values: Any) -> Datum:
        """Return the data of one of the series' marks."""
        return {"strategy": self.strategy, "label": self.name, "position": self.position} | values


def by_world(lines: Sequence[ChartLine]) -> list[Series]:
    """Return the curves of speed over ranks, with equal batches if there are such lines, else with any batches."""
    ok = [line for line in lines if line.speed and line.number("world_size")]
    if not _group(ok, "world_size", (*_DEGREES, *BATCH_COLUMNS)):  # what is alone with any batch is so with equal ones
        return []
    for free in ((), BATCH_COLUMNS[:1], BATCH_COLUMNS[1:], BATCH_COLUMNS):
        series = _group(ok, "world_size", (*_DEGREES, *free))
        if series:
            return series
    return []


def by_micro_batch(lines: Sequence[ChartLine]) -> list[Series]:
    """Return the curves of activation memory over the micro-batch."""
    ok = [line for line in lines if line.ok and line.number("activation_bytes") and line.number("micro_batch")]
    return _group(ok, "micro_batch", BATCH_COLUMNS)


def by_parameters(lines: Sequence[ChartLine]) -> list[Series]:
    """Return the curves of peak memory over the model's size; lines that ran out of memory are points too."""
    known = [line for line in lines if line.status in ("ok", "oom") and line.number("parameters")]
    return _group(known, "parameters", _SIZES)


def _group(lines: Sequence[ChartLine], name: str, free: Sequence[str]) -> list[Series]:
    """Return the series over a column with more than one point; the first of several lines at a point counts."""
    columns = curve_columns(free)
    settings = [tuple(map(line.row.get, columns)) for line in lines]
    values: dict[tuple[Any, ...], set[float | None]] = {}
    for setting, line in zip(settings, lines, strict=True):
        values.setdefault(setting, set()).add(line.number(name))
    groups: dict[tuple[Any, ...], dict[float, ChartLine]] = {}
    for setting, line in zip(settings, lines, strict=True):
        if len(values[setting]) > 1:  # otherwise it is alone on its curve, whatever its options are
            key = curve_key(line.row, line.record.config, free)
            groups.setdefault(key, {}).setdefault(line.number(name) or 0.0, line)
    curves = {key: [points[value] for value in sorted(points)] for key, points in groups.items() if len(points) > 1}
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


def step_losses(view: View, line: ChartLine) -> list[tuple[int, float, str]]:
    """Return step, loss and phase of a line's median run from its steps.jsonl; empty if there is no such file."""
    folder = view.folders.get(median_record(line).row["run_id"])
    return list(_read_losses(folder / "steps.jsonl")) if folder else []


def _read_losses(path: Path) -> Iterator[tuple[int, float, str]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a run that was killed
        entry = entry if isinstance(entry, dict) else {}
        step, loss = finite_number(entry.get("step")), finite_number(entry.get("loss"))
        if step is not None and loss is not None:
            yield int(step), loss, sanitize(entry.get("phase") or "")


def downsample(count: int) -> list[int]:
    """Return the positions of at most _POINTS of `count` points: evenly, the first and the last among them."""
    if count <= _POINTS:
        return list(range(count))
    return [round(point * (count - 1) / (_POINTS - 1)) for point in range(_POINTS)]
