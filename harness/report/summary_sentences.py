"""Sentences on all configurations of a report: the memory wall, scaling, checkpointing, predictions and failures."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from harness.records.plan_validation import read_plan_validation
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Row
from harness.report.charts.lines import chart_lines
from harness.report.charts.series import Series, by_parameters, by_world
from harness.report.comparability import PARTITION_COLUMNS, comparability_key, is_measured
from harness.report.labels import PEAK_TITLES, STEP_TITLES
from harness.report.reported import Reported, ReportedGroup
from harness.report.speeds import Speed, are_alike, speed_of
from harness.report.text import (
    byte_unit,
    bytes_text,
    duration_text,
    format_numbers,
    join_words,
    percent_text,
    pluralize,
)
from harness.report.view import View, median_run, peak_run

_MOST_LINES = 6  # that have a sentence each

_MOST_SIZES = 3  # of models that a sentence lists: the largest, and the smallest


def memory_wall_sentences(view: View) -> Iterator[str]:
    """Yield the largest model that each strategy trained within the memory limit, if some ran out of memory."""
    curves = by_parameters(chart_lines(view))
    points = [line for series in curves for line in series.points]
    limits, worlds = ({line.row.get(name) for line in points} for name in ("memory_limit_bytes", "world_size"))
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None or len(worlds) != 1 or all(line.ok for line in points):
        return
    by_size: dict[int, list[str]] = {}
    for series in curves:
        largest = max((line.row["parameters"] for line in series.points if line.ok), default=0)
        by_size.setdefault(largest, []).append(series.name)
    sizes = [f"{_millions(size)} {join_words(names)}" for size, names in sorted(by_size.items(), reverse=True)]
    if len(sizes) > _MOST_SIZES:
        sizes = [*sizes[: _MOST_SIZES - 1], f"the least, {sizes[-1]}"]
    yield f"The largest model that ran in {bytes_text(limit)} per rank: {'; '.join(sizes)}."


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f} million parameters with" if parameters else "none with"


def scaling_sentences(view: View) -> Iterator[str]:
    """Yield how the speed of each strategy grows with the ranks, the batch and all else being equal.

    There is no sentence where ranks shared processor cores, which no device does, or where a speed is not ranked.
    """
    curves = [
        series for series in by_world(chart_lines(view)) if series.points[0].row.get("checkpointing") in (None, "none")
    ]
    if len({comparability_key(series.points[0].row) for series in curves}) != 1:  # sentences would mix several settings
        return
    for series in curves[:_MOST_LINES]:
        yield from _scaling(series)


def _scaling(series: Series) -> Iterator[str]:
    known = [(line.row["world_size"], speed) for line in series.points if (speed := speed_of(line.record.runs))]
    ranked: list[tuple[int, Speed]] = [(ranks, speed) for ranks, speed in known if speed.is_ranked]
    if len(ranked) < 2:
        return
    (few, slow), *_, (many, fast) = ranked
    times = fast.median / slow.median
    text = f"{series.name} on {many} ranks instead of {few}"
    if are_alike(slow, fast):
        yield f"{text} has no certain difference in tokens/s."
        return
    yield f"{text} has {times:.2f} × the tokens/s, {percent_text(times * few / many)} of linear scaling."


def checkpointing_sentences(group: ReportedGroup) -> Iterator[str]:
    """Yield how much memory each kind of checkpointing saves over the same run without, and what that costs."""
    for line, plain in _checkpointed(group):
        sizes = {"activations": "activation_bytes", "the peak": "peak_allocated_bytes"}
        changes = [text for noun, name in sizes.items() if (text := _size_text(noun, line.row, plain.row, name))]
        if changes:
            kind = line.row["checkpointing"]
            yield f"{kind} checkpointing of {plain.label}: {join_words(changes)}{_cost_text(line, plain)}."


def checkpointing_answer(group: ReportedGroup) -> str:
    """Return what each kind of checkpointing saves of one configuration's peak: of the one that has the most kinds."""
    kinds: dict[str, list[str]] = {}
    for line, plain in _checkpointed(group):
        if line.peak and plain.peak:
            share = 1 - line.peak / plain.peak
            saves = f"{'saves' if share >= 0 else 'adds'} {percent_text(abs(share))}{_cost_text(line, plain)}"
            kinds.setdefault(plain.label, []).append(f"{line.row['checkpointing']} {saves}")
    label = max(kinds, key=lambda name: len(kinds[name]), default="")
    return f"Of the peak of {label}, {'; '.join(kinds[label])}." if label else ""


def _checkpointed(group: ReportedGroup) -> Iterator[tuple[Reported, Reported]]:
    """Yield every configuration that checkpoints, with the same one that does not."""
    plains: dict[tuple[Any, ...], Reported] = {}
    for line in group.members:
        if line.row.get("checkpointing") in (None, "none"):
            plains.setdefault(_key(line), line)
    for line in group.members:
        plain = plains.get(_key(line))
        if line.row.get("checkpointing") not in (None, "none") and plain is not None:
            yield line, plain


def _size_text(noun: str, after: Row, before: Row, name: str) -> str:
    """Return by how much memory is smaller or larger than before; empty where either is unknown."""
    new, old = after.get(name), before.get(name)
    if new is None or not old:
        return ""
    share = abs(1 - new / old)
    return (
        f"{noun} {percent_text(share)} {'smaller' if new < old else 'larger'}"
        if share >= 0.0005
        else f"{noun} as large"
    )


def _cost_text(line: Reported, plain: Reported) -> str:
    """Return the speed and the operations that checkpointing costs; empty where neither is known."""
    costs = [recomputation_text(line, plain)]
    if line.speed.is_ranked and plain.speed.is_ranked:
        change = line.speed.median / plain.speed.median - 1
        if are_alike(line.speed, plain.speed):
            costs.insert(0, "no certain difference in speed")
        else:
            costs.insert(0, f"{percent_text(abs(change))} {'less' if change < 0 else 'more'} speed")
    known = [cost for cost in costs if cost]
    return f", at {' and '.join(known)}" if known else ""


def _key(line: Reported) -> tuple[Any, ...]:
    """Return a key that is equal for configurations that differ in checkpointing alone."""
    return tuple(line.row.get(name) for name in (*PARTITION_COLUMNS, "micro_batch", "offload_activations"))


def prediction_sentences(view: View) -> Iterator[str]:
    """Yield how far the predicted peaks are from the measured ones."""
    rows = [line.row for line in view.lines if line.status == "ok" and is_measured(line.row)]
    pairs = [(row.get("predicted_peak_bytes"), row.get("peak_allocated_bytes")) for row in rows]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted is not None and measured]
    if errors:
        count, middle, largest = pluralize(len(errors), "configuration"), statistics.median(errors), max(errors)
        yield (
            f"The peaks predicted for {count} are off by {percent_text(middle)} in the median and by"
            f" {percent_text(largest)} at most."
        )


def validation_sentences(view: View) -> Iterator[str]:
    """Yield whether the predicted winner of a sweep won, for each folder whose sweep validated its plan."""
    for folder in dict.fromkeys(path.parent for path in view.folders.values()):
        validation = read_plan_validation(ComparisonFolder(folder))
        if validation is not None:
            yield validation.sentence()


def failure_sentences(view: View) -> Iterator[str]:
    """Yield how many configurations have no figures, by status."""
    statuses = [line.status for line in view.lines]
    failed = {status: statuses.count(status) for status in dict.fromkeys(statuses) if status != "ok"}
    if failed:
        counts = ", ".join(f"{count} {status}" for status, count in failed.items())
        total = sum(failed.values())
        verb = "has" if total == 1 else "have"
        yield f"{total} of {len(statuses)} configurations {verb} no figures ({counts}): the reasons are under Failures."


# A part is named if it is at least this share of the difference; the named ones are at least EXPLAINED of it.
_LEAST_SHARE, _EXPLAINED = 0.2, 0.5

_MOST_PARTS = 2


def step_reason(fast: Reported, slow: Reported) -> str:
    """Return the sentence on why a step of `slow` is longer; empty where no part of the step explains it.

    A part explains it if it is longer in the median runs, and in every run of `slow` longer than in any run of `fast`.
    """
    difference = _median(slow, "step_seconds") - _median(fast, "step_seconds")
    if difference <= 0:
        return ""
    longer = {
        title: _median(slow, name) - _median(fast, name)
        for name, title in STEP_TITLES.items()
        if _is_longer(slow, fast, name)
    }
    parts = _largest(longer, difference)
    if not parts:
        return ""
    texts = [f"{duration_text(seconds)} more {_step_part(title, fast, slow)}" for title, seconds in parts.items()]
    longer_text = f"{duration_text(difference)} longer than one of {fast.label}"
    return f"A step of {slow.label} takes {longer_text} in median runs, mainly by {join_words(texts)}."


def _median(line: Reported, name: str) -> float:
    """Return the part of a step in the run with the median speed: parts add up within one run only."""
    return median_run(line.record).row.get(name) or 0.0


def _is_longer(slow: Reported, fast: Reported, name: str) -> bool:
    slowest, fastest = ([run.row.get(name) or 0.0 for run in line.timed] for line in (slow, fast))
    return min(slowest) > max(fastest)


def _step_part(title: str, fast: Reported, slow: Reported) -> str:
    """Return the name of a part; of a backward, how many more operations ran where checkpointing repeats forwards."""
    before, after = fast.row.get("executed_flops"), slow.row.get("executed_flops")
    if title == "backward" and before and after and after > 1.02 * before:
        also = "" if fast.row.get("strategy") == slow.row.get("strategy") else "also "
        return f"backward, which {also}recomputes activations ({after / before:.2f} × the operations)"
    return title


def _largest(differences: dict[str, float], whole: float) -> dict[str, float]:
    """Return the largest parts of a difference, if together they explain it."""
    ordered = sorted(differences.items(), key=lambda item: -item[1])[:_MOST_PARTS]
    named = {title: part for title, part in ordered if part >= _LEAST_SHARE * whole}
    return named if sum(named.values()) >= _EXPLAINED * whole else {}


def memory_reason(small: Reported, large: Reported) -> str:
    """Return the sentence on what `large` has more of at its peak; empty where the parts are not known."""
    small_row, large_row = peak_run(small.record).row, peak_run(large.record).row
    difference = (large.peak or 0) - (small.peak or 0)
    names = {name: title for part, title in PEAK_TITLES.items() if (name := f"at_peak_{part}_bytes") in large_row}
    more = {title: (large_row.get(name) or 0) - (small_row.get(name) or 0) for name, title in names.items()}
    parts = _largest({title: float(size) for title, size in more.items()}, difference) if difference > 0 else {}
    if not parts:
        return ""
    unit = byte_unit([difference, *parts.values()])
    whole, *numbers = format_numbers([difference, *parts.values()], unit)
    texts = [f"{number} {unit.name} more {title}" for number, title in zip(numbers, parts, strict=True)]
    opposite, size = min(more.items(), key=lambda item: item[1])
    less = ""
    if sum(parts.values()) > difference and size < 0:
        less = f", and despite {format_numbers([difference, -size], unit)[1]} {unit.name} less {opposite}"
    return (
        f"The peak of {large.label} is {whole} {unit.name} above that of {small.label}, mainly by"
        f" {join_words(texts)}{less}."
    )


def recomputation_text(line: Reported, plain: Reported) -> str:
    """Return how many more operations checkpointing runs; empty where they are not counted or none are repeated."""
    before, after = plain.row.get("executed_flops"), line.row.get("executed_flops")
    return f"{percent_text(after / before - 1)} more operations" if before and after and after > before else ""


def pipeline_texts(members: Sequence[Reported]) -> Iterator[str]:
    """Yield the measured and the formula's idle time of every pipeline whose ranks nothing disturbed."""
    for line in members:
        if line.speed.is_disturbed or line.speed.is_crowded:
            continue
        bubble, formula = line.row.get("pipeline_bubble"), line.row.get("pipeline_bubble_theory")
        if bubble is not None and formula is not None:
            yield f"{line.label} {bubble:.2f} (formula {formula:.2f})"
