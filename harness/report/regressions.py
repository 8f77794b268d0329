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
from harness.report.comparability import group_by
from harness.report.folder_changes import MISSING, Pair, changes, configuration_changes, pairs
from harness.report.sentences import sentence
from harness.util.files import JsonObject

# The columns that may not grow.
EXACT_COLUMNS = (
    *("peak_allocated_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"),
    *("communication_bytes", "executed_flops"),
)

SPEED = "tokens_per_second"  # the column that may not fall

Verdict = Literal["regressed", "within limit", "improved"]


@dataclass(frozen=True)
class Figure:
    """One side of a change: a number, or the status of the runs in words; speeds have the range of their repeats."""

    value: float | str | None  # None is no longer known
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


def compare(
    baseline: Sequence[Record], current: Sequence[Record], limit: float, across_versions: bool = False
) -> JsonObject:
    """Return what changed from the baseline, as `--json` has it.

    Args:
        baseline: The records, or the rows of a runs.csv, that must be held.
        current: Those that are compared with it.
        limit: The growth that is tolerated, relative.
        across_versions: Whether speeds are compared although versions differ, as in a test of an upgrade.
    """
    configuration = configuration_changes(baseline, current)
    other_keys = [key for key, values in configuration.items() if "-" in values]  # that only some versions have
    lines = pairs(baseline, current, other_keys)
    compared = [pair for pair in lines if pair.first.status == "ok"]
    reasons = {pair.label: _why_unjudged(pair, across_versions) for pair in compared if pair.is_ok}
    differences = [
        Change(pair.label, column, before, after, growth, _verdict(growth, limit))
        for pair in compared
        for column, before, after, growth in _differences(pair)
        if column != SPEED or (not reasons[pair.label] and abs(growth) > limit)
    ]
    labels = group_by(reasons, reasons.__getitem__)
    return {
        "limit": limit,
        "compared": len(compared),  # configurations that the baseline has as ok
        "changes": sorted(differences, key=lambda change: -change.growth),  # worst first
        "judged_speeds": len(labels.pop("", [])),
        "unjudged_speeds": labels,  # of the configurations, by the reason
        "configuration": {key: values for key, values in configuration.items() if key not in other_keys},
        "new": [pair.label for pair in lines if pair.first is MISSING],
        "holds": all(change.verdict != "regressed" for change in differences),
    }


def _why_unjudged(pair: Pair, across_versions: bool) -> str:
    """Return why the speeds of two lines that ended ok cannot be compared; empty if they can."""
    first, second = pair.first, pair.second
    devices = str(first.row.get("measured_on")), str(second.row.get("measured_on"))
    origins = {"device": devices, "machine": (machine_text(first), machine_text(second))}
    origins |= {} if across_versions else {"versions": (versions_text(first), versions_text(second))}
    for part, (before, after) in origins.items():
        if before is None or after is None:
            return sentence("unknown_origin", part=part, before=before, after=after)
        if before != after and part == "versions":
            versions = ([dict(entry.rsplit(" ", 1) for entry in text.split(", "))] for text in (before, after))
            return sentence("other_versions", changes=changes(*versions))
        if before != after:
            return sentence("other_origin", part=part, before=before, after=after)
    return "" if pair.speeds else sentence("too_few_runs")


def _differences(pair: Pair) -> Iterator[tuple[str, Figure, Figure, float]]:
    """Yield the columns that differ, with both figures and the growth: of the status, exact figures and the speed."""
    if _ok_share(pair.second) < _ok_share(pair.first):
        yield "status", Figure("ok"), Figure(sentence("less_ok", row=pair.second.row)), math.inf
    for column in EXACT_COLUMNS if pair.is_ok else ():
        least, most = _range(pair.first, column, unknown=math.nan)  # which nothing exceeds
        new_least, new_most = _range(pair.second, column, unknown=math.inf)
        if new_least > most:
            grown = Figure(new_least if math.isfinite(new_least) else None)
            yield column, Figure(most), grown, (new_least - most) / most if most else math.inf
        if new_most < least:
            yield column, Figure(least), Figure(new_most), (new_most - least) / least
    if pair.speeds and not pair.is_unsettled:
        before, after = (Figure(speed.median, (speed.low, speed.high), speed.runs) for speed in pair.speeds)
        yield SPEED, before, after, 1 - pair.speeds[1].median / pair.speeds[0].median


def _ok_share(line: Record) -> float:
    """Return the share of repeats that ended ok."""
    return float(line.row["runs_alike"] / line.row["runs"]) if line.status == "ok" else 0.0


def _range(line: Record, column: str, unknown: float) -> tuple[float, float]:
    """Return the least and the largest value of a column in the runs that ended ok, `unknown` if none has one."""
    values = [run.row[column] for run in line.runs if run.status == "ok" and run.row.get(column) is not None]
    return min(values, default=unknown), max(values, default=unknown)


def _verdict(growth: float, limit: float) -> Verdict:
    if growth < 0:
        return "improved"
    return "within limit" if growth <= limit or math.isclose(growth, limit) else "regressed"
