"""Sentences on all configurations of a report: the memory wall, scaling, predictions and failures."""

import statistics
from collections.abc import Iterator

from harness.report.charts.lines import chart_lines
from harness.report.charts.series import by_parameters, by_world
from harness.report.comparability import comparability_key
from harness.report.text import bytes_text, join_words, percent_text, pluralize
from harness.report.view import View

_MOST_LINES = 6  # that have a sentence each


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
    yield f"The largest model that ran in {bytes_text(limit)} per rank: {'; '.join(sizes)}."


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f} million parameters with" if parameters else "none with"


def scaling_sentences(view: View) -> Iterator[str]:
    """Yield how the speed of each strategy grows with the world size, the batch and all else being equal."""
    curves = [
        series for series in by_world(chart_lines(view)) if series.points[0].row.get("checkpointing") in (None, "none")
    ]
    if len({comparability_key(series.points[0].row) for series in curves}) != 1:  # sentences would mix several settings
        return
    for series in curves[:_MOST_LINES]:
        (small, slow), *_, (large, fast) = [(line.row["world_size"], line.speed or 0.0) for line in series.points]
        yield (
            f"{series.name} from {small} to {large} rank{'s'[: large > 1]}: {fast / slow:.2f} × the tokens/s, which is"
            f" {percent_text(fast / slow * small / large)} of what {large / small:g} × would be."
        )


def prediction_sentences(view: View) -> Iterator[str]:
    """Yield how far the predicted peaks are from the measured ones."""
    rows = [line.row for line in view.lines if line.status == "ok"]
    pairs = [(row.get("predicted_peak_bytes"), row.get("peak_allocated_bytes")) for row in rows]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted is not None and measured]
    if errors:
        count, middle, largest = pluralize(len(errors), "configuration"), statistics.median(errors), max(errors)
        yield (
            f"The peaks predicted for {count} are off by {percent_text(middle)} in the median and by"
            f" {percent_text(largest)} at most."
        )


def failure_sentences(view: View) -> Iterator[str]:
    """Yield how many configurations have no figures, by status."""
    statuses = [line.status for line in view.lines]
    failed = {status: statuses.count(status) for status in dict.fromkeys(statuses) if status != "ok"}
    if failed:
        counts = ", ".join(f"{count} {status}" for status, count in failed.items())
        total = sum(failed.values())
        yield f"{total} of {len(statuses)} configurations have no figures ({counts}): the reasons are under Failures."
