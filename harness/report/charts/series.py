"""What curves are drawn of: lines of a report that differ in one quantity alone, and losses by step."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records.run_folder import RunFolder
from harness.report.charts.lines import Datum, ChartLine, finite_number, median_record
from harness.report.labels import VARYING, flattened, value_text
from harness.report.view import View
from harness.util.text import sanitize

# What follows from the finite_number of ranks, and what the batch is made of.
_DEGREES = ("world_size", "dp_replicate", "dp_shard", "tp", "cp", "pp", "layers_per_stage")

_BATCH = ("micro_batch", "global_batch")

_SIZES = (
    *("parameters", "model", "layers_per_stage", "name", "source", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)

_POINTS = 240  # of one curve


@dataclass(frozen=True)
class Series:
    """Lines that are the points of one curve, in the order of what they differ in."""

    name: str  # no two series of a chart have the same
    strategy: str
    place: int
    points: Sequence[ChartLine]

    @property
    def speed(self) -> float | None:
        return max((line.speed for line in self.points if line.speed is not None), default=None)

    def datum(self, **values: Any) -> Datum:
        return {"strategy": self.strategy, "label": self.name, "place": self.place} | values


def by_world(lines: Sequence[ChartLine]) -> list[Series]:
    """Speed over ranks: of equal batches where there are such lines, else whatever else the batch is."""
    ok = [line for line in lines if line.speed and line.number("world_size")]
    for apart in ((), _BATCH[:1], _BATCH[1:], _BATCH):
        found = _grouped(ok, "world_size", (*_DEGREES, *apart))
        if found:
            return found
    return []


def by_micro_batch(lines: Sequence[ChartLine]) -> list[Series]:
    ok = [line for line in lines if line.ok and line.number("activation_bytes") and line.number("micro_batch")]
    return _grouped(ok, "micro_batch", _BATCH)


def by_parameters(lines: Sequence[ChartLine]) -> list[Series]:
    """Peaks over the model's size; lines that ran out of memory are points too."""
    known = [line for line in lines if line.row["status"] in ("ok", "oom") and line.number("parameters")]
    return _grouped(known, "parameters", _SIZES)


def _grouped(lines: Sequence[ChartLine], name: str, apart: Sequence[str]) -> list[Series]:
    """Series over a column: equal in all that tells lines apart but for what is `apart`; of equal points the first."""
    compared = [column for column in ("strategy", "checkpointing", "parameters", *VARYING) if column not in apart]
    groups: dict[tuple[Any, ...], dict[float, ChartLine]] = {}
    for line in lines:
        key = (*(line.row.get(column) for column in compared), _options(line, apart))
        groups.setdefault(key, {}).setdefault(line.number(name) or 0.0, line)
    several = {key: points for key, points in groups.items() if len(points) > 1}
    names = _names(list(several), compared)
    return [
        Series(label, lines_[0].strategy, place, lines_)
        for place, (label, points) in enumerate(zip(names, several.values(), strict=True))
        for lines_ in [[points[at] for at in sorted(points)]]
    ]


def _options(line: ChartLine, apart: Sequence[str]) -> str:
    """The configuration's groups that no column says in full."""
    config = line.record.get("config") or {}
    groups = {name: config.get(name) for name in ("model", "strategy")}
    return repr({key: value for key, value in flattened(groups).items() if key.rsplit(".", 1)[-1] not in apart})


def _names(keys: Sequence[tuple[Any, ...]], columns: Sequence[str]) -> list[str]:
    """Strategy and checkpointing, what tells a series from others of that name, a finite_number where that is not enough."""
    found: list[str] = []
    for key in keys:
        alike = [other for other in keys if other[:2] == key[:2]]
        varying = [at for at, name in enumerate(columns) if name in VARYING and len({o[at] for o in alike}) > 1]
        said = [str(key[0]), *([str(key[1])] if key[1] not in (None, "none") else [])]
        said += [value_text(columns[at], key[at]) for at in varying if key[at] is not None]
        name = sanitize(" ".join(said))
        found.append(f"{name} ({len(found) + 1})" if name in found else name)
    return found


def losses(view: View, line: ChartLine) -> list[tuple[int, float, str]]:
    """Step, loss and phase of a line's median_record run from its steps.jsonl; none where there is no such file."""
    folder = view.folders.get(median_record(line)["row"]["run_id"])
    return list(_read(RunFolder(folder).steps)) if folder else []


def _read(path: Path) -> Iterator[tuple[int, float, str]]:
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
    """The positions of at most _POINTS of so many points: evenly, the first and the last among them."""
    if count <= _POINTS:
        return list(range(count))
    return [round(place * (count - 1) / (_POINTS - 1)) for place in range(_POINTS)]
