"""Why one configuration is faster or smaller than another: the parts of the step, or of the peak, that differ."""

from collections.abc import Iterator, Sequence

from harness.report.labels import PEAK_PARTS, STEP_PARTS
from harness.report.reported import Reported
from harness.report.text import byte_unit, duration_text, format_numbers, join_words, percent_text
from harness.report.view import median_run, peak_run

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
        for name, title in STEP_PARTS.items()
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
    names = {name: title for part, title in PEAK_PARTS.items() if (name := f"at_peak_{part}_bytes") in large_row}
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
