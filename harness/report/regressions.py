"""The comparison of a folder with a baseline: which configurations need more, became slower, or no longer run.

Bytes of state, bytes sent and operations are the same in every run of a program, so that any growth of theirs is real.
A peak on a CPU also has the buffers of gloo's threads, as many as exist at once: it has grown only if it has in every
repeat. A speed has changed only if it has left the range of its repeats.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.records.provenance import machine_text, versions_text
from harness.records.schema import Record
from harness.report.folder_changes import Changes, Pair, configuration_changes, pairs
from harness.report.speeds import MINIMUM_RUNS, Speed, leads
from harness.report.text import outcome_text

# The columns that may not grow.
EXACT_COLUMNS = (
    *("peak_allocated_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"),
    *("communication_bytes", "executed_flops"),
)

SPEED = "tokens_per_second"  # the column that may not fall

_FEW_RUNS = f"fewer than {MINIMUM_RUNS} undisturbed runs in A or in B: repeats={MINIMUM_RUNS} makes them"

Verdict = Literal["regressed", "within limit", "improved"]

_ORDER: tuple[Verdict, ...] = ("regressed", "within limit", "improved")


@dataclass(frozen=True)
class Figure:
    """One side of a change: a number, or the status of the runs in words; speeds have the range of their repeats."""

    value: float | str | None
    range: tuple[float, float] | None = None
    runs: int | None = None


@dataclass(frozen=True)
class Change:
    """A figure of one configuration that differs from the baseline's.

    `growth` is relative, and positive if the figure became worse: more memory, or a lower speed. It is infinite where a
    run is missing or fails, or where a figure is no longer known.
    """

    run: str
    column: str
    before: Figure
    after: Figure
    growth: float
    verdict: Verdict


@dataclass(frozen=True)
class BaselineCheck:
    """The outcome of a comparison with a baseline."""

    limit: float  # the growth that is tolerated, relative
    compared: int  # configurations that the baseline has as ok
    changes: Sequence[Change]  # worst first
    judged_speeds: int
    unjudged_speeds: dict[str, list[str]]  # configurations whose speeds were not judged, by the reason
    configuration: Changes  # of keys that all runs of a side share
    new: Sequence[str]  # configurations that the baseline does not have

    @property
    def regressed(self) -> list[Change]:
        """The changes for which the comparison fails."""
        return [change for change in self.changes if change.verdict == "regressed"]


def compare(
    baseline: Sequence[Record], current: Sequence[Record], limit: float, across_versions: bool = False
) -> BaselineCheck:
    """Return what changed from the baseline.

    Args:
        baseline: The records, or the rows of a runs.csv, that must be held.
        current: Those that are compared with it.
        limit: The growth that is tolerated, relative.
        across_versions: Whether speeds are compared although versions differ, as in a test of an upgrade.
    """
    configuration = configuration_changes(baseline, current)
    only_in_one = {key: values for key, values in configuration.items() if "-" in values}  # keys of other versions
    lines = pairs(baseline, current, only_in_one)
    changes: list[Change] = []
    unjudged: dict[str, list[str]] = {}
    compared = judged = 0
    new = [pair.label for pair in lines if pair.first is None]
    for pair in lines:
        label = pair.label
        if pair.first is None or pair.first.status != "ok":
            continue
        compared += 1
        changes += _failure(pair)
        if pair.second is None or not pair.is_ok:
            continue
        changes += _exact_changes(label, pair.first, pair.second, limit)
        reason = _why_incomparable(pair.first, pair.second, across_versions)
        if not reason and pair.speeds:
            judged += 1
            changes += _speed_change(label, *pair.speeds, limit)
        else:
            unjudged.setdefault(reason or _FEW_RUNS, []).append(label)
    changes.sort(key=lambda change: (_ORDER.index(change.verdict), -change.growth))
    changed = {key: values for key, values in configuration.items() if key not in only_in_one}
    return BaselineCheck(limit, compared, changes, judged, unjudged, changed, new)


def _failure(pair: Pair) -> Iterator[Change]:
    """Yield the change of a configuration of which fewer runs end ok than in the baseline."""
    label, first, second = pair.label, pair.first, pair.second
    if first is None or (second and second.status == "ok" and _ok_share(second) >= _ok_share(first)):
        return
    if second is None:
        after = "missing"
    elif second.status == "ok":
        after = f"ok in {second.row['runs_alike']} of {second.row['runs']} runs"
    else:
        after = outcome_text(second.row)
    yield Change(label, "status", Figure("ok"), Figure(after), math.inf, "regressed")


def _ok_share(line: Record) -> float:
    share: float = line.row["runs_alike"] / line.row["runs"]
    return share


def _exact_changes(label: str, first: Record, second: Record, limit: float) -> Iterator[Change]:
    for column in EXACT_COLUMNS:
        ranges = _range(first, column), _range(second, column)
        if ranges[0] is None:
            continue
        if ranges[1] is None:
            yield Change(label, column, Figure(ranges[0][1]), Figure(None), math.inf, "regressed")
        elif ranges[1][0] > ranges[0][1] or ranges[1][1] < ranges[0][0]:
            before, after = (
                (ranges[0][1], ranges[1][0]) if ranges[1][0] > ranges[0][1] else (ranges[0][0], ranges[1][1])
            )
            growth = (after - before) / before if before else math.inf
            yield Change(label, column, Figure(before), Figure(after), growth, _verdict(growth, limit))


def _range(line: Record, column: str) -> tuple[float, float] | None:
    """Return the least and the largest value of a column in the line's runs that ended ok; None if none has one."""
    values = [run.row[column] for run in line.runs if run.status == "ok" and run.row.get(column) is not None]
    return (min(values), max(values)) if values else None


def _verdict(growth: float, limit: float) -> Verdict:
    if growth < 0:
        return "improved"
    return "within limit" if growth <= limit or math.isclose(growth, limit) else "regressed"


def _speed_change(label: str, before: Speed, after: Speed, limit: float) -> Iterator[Change]:
    """Yield the change of the median speed if one side certainly leads, and by more than the limit."""
    fall = 1 - after.median / before.median
    if abs(fall) > limit and (leads(before, [after]) or leads(after, [before])):
        yield Change(label, SPEED, _speed_figure(before), _speed_figure(after), fall, _verdict(fall, limit))


def _speed_figure(speed: Speed) -> Figure:
    return Figure(speed.median, (speed.low, speed.high), speed.runs)


def _why_incomparable(first: Record, second: Record, across_versions: bool) -> str:
    """Return why the speeds of two lines cannot be compared; empty if they can."""
    devices = first.row.get("measured_on"), second.row.get("measured_on")
    if devices[0] != devices[1]:
        return f"the device differs: {devices[0]} → {devices[1]}"
    texts = {"machine": (machine_text(first), machine_text(second))}
    texts |= {} if across_versions else {"versions": (versions_text(first), versions_text(second))}
    for kind, (before, after) in texts.items():
        if before is None or after is None:
            unknown = [side for side, text in (("A", before), ("B", after)) if text is None]
            verb = "does" if len(unknown) == 1 else "do"
            return f"{' and '.join(unknown)} {verb} not say which {kind} made these rows"
        if before != after and kind == "machine":
            return f"the machine differs: {before} → {after}"
        if before != after:
            return f"versions differ: {_different_versions(before, after)}"
    return ""


def _different_versions(first: str, second: str) -> str:
    """Return the versions that differ between two texts of provenance.versions_text()."""
    before, after = (dict(entry.rsplit(" ", 1) for entry in text.split(", ")) for text in (first, second))
    names = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    return ", ".join(f"{name} {before.get(name, '-')} → {after.get(name, '-')}" for name in names)
