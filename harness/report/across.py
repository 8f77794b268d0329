"""Sentences on all lines of a report: the memory wall, scaling, predictions, failures."""

import statistics
from collections.abc import Iterator
from typing import Any

from harness.report import comparison as c
from harness.report.view import View
from harness.report.words import listed, percent

_MOST_LINES = 6  # that are told one by one


def wall(view: View) -> Iterator[str]:
    """The largest model that each strategy trained in the memory there was, where some ran out of it."""
    rows = [line["row"] for line in view.lines]
    rows = [row for row in rows if row.get("parameters") and row.get("memory_limit_bytes")]
    limits, worlds = ({row.get(name) for row in rows} for name in ("memory_limit_bytes", "world_size"))
    sizes = sorted({row["parameters"] for row in rows}, reverse=True)
    if len(limits) != 1 or len(worlds) != 1 or len(sizes) < 2 or not any(row["status"] == "oom" for row in rows):
        return
    largest: dict[str, int] = {}
    for row in rows:
        kind = row.get("checkpointing")
        name = f"{row.get('strategy')}{'' if kind in (None, 'none') else f' {kind}'}"
        fitted = row["parameters"] if row["status"] == "ok" else 0
        largest[name] = max(largest.get(name, 0), fitted)
    by_size = {size: [name for name, most in largest.items() if most == size] for size in (*sizes, 0)}
    told = [f"{_millions(size)} {listed(names)}" for size, names in by_size.items() if names]
    yield f"The largest model that ran in {c.bytes_text(limits.pop())} a rank: {'; '.join(told)}."


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f} million parameters with" if parameters else "none with"


def scaling(view: View) -> Iterator[str]:
    """How the speed of each strategy grows with the world, the batch and all else being the same."""
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for line in view.lines:
        row = line["row"]
        if row["status"] == "ok" and row.get("tokens_per_second") and row.get("world_size"):
            key = (*c.setting(row), row.get("checkpointing"), row.get("strategy"))
            groups.setdefault(key, {}).setdefault(row["world_size"], row["tokens_per_second"])
    growing = {key: by_world for key, by_world in groups.items() if len(by_world) > 1}
    if len({key[:-2] for key in growing}) != 1:  # several settings, which sentences would mix
        return
    for key, by_world in [pair for pair in growing.items() if pair[0][-2] in (None, "none")][:_MOST_LINES]:
        small, large = min(by_world), max(by_world)
        gained = by_world[large] / by_world[small]
        yield (
            f"{key[-1]} from {small} to {large} rank{'s'[: large > 1]}: {gained:.2f} × the tokens/s, which is"
            f" {percent(gained * small / large)} of what {large / small:g} × would be."
        )


def predictions(view: View) -> Iterator[str]:
    rows = [line["row"] for line in view.lines if line["row"]["status"] == "ok"]
    pairs = [(row.get("predicted_peak_bytes"), row.get("peak_allocated_bytes")) for row in rows]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted is not None and measured]
    if errors:
        count, middle, largest = c.counted(len(errors), "line"), statistics.median(errors), max(errors)
        yield (
            f"The peaks predicted for {count} are off by {percent(middle)} in the median and by {percent(largest)} at"
            " most."
        )


def failures(view: View) -> Iterator[str]:
    ends = [line["row"]["status"] for line in view.lines]
    failed = {end: ends.count(end) for end in dict.fromkeys(ends) if end != "ok"}
    if failed:
        counts = ", ".join(f"{count} {end}" for end, count in failed.items())
        yield f"{sum(failed.values())} of {len(ends)} lines have no figures ({counts}): the reasons are under Failures."
