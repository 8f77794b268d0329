"""Sentences on a group of comparable lines: the fastest, the smallest, the costs of the rest, and a recommendation."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.records.schema import Record, Row
from harness.report.best import pareto_front
from harness.report.claim_peers import Claim
from harness.report.claims import claims
from harness.report.comparability import PARTITION_COLUMNS
from harness.report.spread import is_unsettled, spread
from harness.report.text import byte_unit, bytes_text, join_words, percent_text

_MOST_LINES = 6  # of a group that have a sentence each

_VOLUME = "bytes sent a step over DDP's"  # the beginning of the claim on communication


@dataclass(frozen=True)
class ReportedLine:
    """A line that is ok, as sentences refer to it."""

    label: str
    record: Record  # as merged
    baseline: str | None  # its label

    @property
    def row(self) -> Row:
        """The merged row."""
        row: Row = self.record.row
        return row

    @property
    def speed(self) -> float:
        """Tokens per second of the whole world."""
        return float(self.row["tokens_per_second"])

    @property
    def peak(self) -> int | None:
        """The peak memory of the rank with the largest one, in bytes."""
        peak: int | None = self.row.get("peak_allocated_bytes")
        return peak

    @property
    def speed_text(self) -> str:
        """The speed with its unit."""
        return f"{self.speed:,.0f} tokens/s"


def group_sentences(lines: Sequence[ReportedLine], fits_in: int | None, in_full: bool = True) -> Iterator[str]:
    """Yield the sentences on one group.

    Args:
        lines: The lines of the group.
        fits_in: The memory in bytes that a recommendation is for, or None for every size of device.
        in_full: Whether to compare every line with its baseline too.
    """
    by_speed = sorted(lines, key=lambda line: -line.speed)
    if len(lines) > 1 and all(_has_spread(line) for line in lines):
        yield _fastest(by_speed)
    if all(line.peak is not None for line in lines):
        yield _smallest(lines, by_speed[0])
        if fits_in is not None:
            yield _fitting(lines, fits_in)
        elif all(_has_spread(line) for line in lines):
            yield from _ladder(_front(lines))
    if in_full:
        group_claims = claims([line.record for line in lines], [line.label for line in lines])
        yield from _against_baseline(lines, group_claims)
        yield from itertools.islice(_checkpointing(lines), _MOST_LINES)
        yield from _bubbles(lines)


def _fastest(by_speed: Sequence[ReportedLine]) -> str:
    first = by_speed[0]
    rivals = [line for line in by_speed[1:] if _unsettled(line, first)]
    spread_of_first = _spread_text(first)
    if rivals:
        names = join_words([line.label for line in rivals[:_MOST_LINES]])
        more = f" or {len(rivals) - _MOST_LINES} more" if len(rivals) > _MOST_LINES else ""
        return (
            f"Fastest by its median is {first.label}: {first.speed_text}{spread_of_first}, but the spreads leave"
            f" open whether {names}{more} {'are' if len(rivals) > 1 else 'is'} as fast."
        )
    second = by_speed[1]
    lead = f"{first.speed / second.speed:.2f} × of {second.label}, the next"
    return f"{first.label} is fastest: {first.speed_text}{spread_of_first}, {lead}."


def _has_spread(line: ReportedLine) -> bool:
    """Return whether the speed was measured in enough steps or runs to have a spread."""
    return spread(line.row) is not None


def _unsettled(line: ReportedLine, other: ReportedLine) -> bool:
    return is_unsettled(line.speed / other.speed, spread(line.row), spread(other.row))


def _spread_text(line: ReportedLine) -> str:
    between = line.row.get("between_runs")
    return f" (± {percent_text(between)} over {line.row['runs_alike']} runs)" if between is not None else ""


def _smallest(lines: Sequence[ReportedLine], fastest: ReportedLine) -> str:
    smallest = min(lines, key=lambda line: (line.peak or 0, -line.speed))
    text = f"{smallest.label} needs the least memory: {bytes_text(smallest.peak or 0)} at the peak of its fullest rank"
    if not (_has_spread(smallest) and _has_spread(fastest)):
        return text + "."
    if smallest is fastest:
        return text + ", the fastest too."
    share, times = _share(smallest.peak, fastest.peak), _times(smallest, fastest)
    return f"{text}, {share} of {fastest.label}'s, at {times} of its tokens/s."


def _front(lines: Sequence[ReportedLine]) -> list[ReportedLine]:
    """Return the lines that no other beats in both speed and peak memory, from the fastest to the smallest."""
    best = pareto_front([(float(line.peak or 0), line.speed) for line in lines])
    distinct: dict[tuple[float, int | None], ReportedLine] = {}
    for line, is_best in zip(lines, best, strict=True):
        if is_best:
            distinct.setdefault((line.speed, line.peak), line)
    return sorted(distinct.values(), key=lambda line: -line.speed)


def _ladder(front: Sequence[ReportedLine]) -> Iterator[str]:
    """Yield the run to choose for every size of device, if only tokens per second count."""
    steps = [f"from {_at_least(line.peak or 0)} {line.label} ({line.speed_text})" for line in reversed(front)]
    if len(steps) > _MOST_LINES:
        steps = [*steps[: _MOST_LINES - 1], "…", steps[-1]]
    if len(front) > 1:
        yield (
            f"The fastest that a device's memory allows: {', '.join(steps)}. In less than the first nothing measured"
            " here fits."
        )


def _fitting(lines: Sequence[ReportedLine], fits_in: int) -> str:
    limit = bytes_text(fits_in)
    fitting = [line for line in lines if line.peak is not None and line.peak <= fits_in]
    if not fitting:
        least = min(line.peak or 0 for line in lines)
        return f"Nothing measured here fits in {limit}: the least is {bytes_text(least)}."
    if not all(_has_spread(line) for line in fitting):
        return f"{len(fitting)} of {len(lines)} fit in {limit}: {join_words([line.label for line in fitting])}."
    first, *others = sorted(fitting, key=lambda line: -line.speed)
    rivals = [line.label for line in others if _unsettled(line, first)]
    text = f"Of the {len(fitting)} of {len(lines)} that fit in {limit}, {first.label} is fastest: {first.speed_text} in"
    text += f" {bytes_text(first.peak or 0)}"
    return text + (
        f"; the spreads leave open whether {join_words(rivals[:_MOST_LINES])} would be as fast." if rivals else "."
    )


def _against_baseline(lines: Sequence[ReportedLine], group_claims: Sequence[Claim]) -> Iterator[str]:
    """Yield the memory, speed and bytes of each line over those of its baseline, if both checkpoint alike."""
    by_label = {line.label: line for line in lines}
    compared = [line for line in lines if line.baseline in by_label and line.baseline != line.label]
    kind = {line.label: line.row.get("checkpointing") for line in lines}
    compared = [line for line in compared if kind[line.label] == kind[str(line.baseline)]]
    for line in compared[:_MOST_LINES]:
        base = by_label[str(line.baseline)]
        parts = []
        if line.peak is not None and base.peak:
            parts.append(f"holds {_share(line.peak, base.peak)} of {base.label}'s peak")
        if _has_spread(line) and _has_spread(base):
            parts.append(f"runs at {_times(line, base)} of its tokens/s")
        sent, base_sent = line.row.get("communication_bytes"), base.row.get("communication_bytes")
        if sent is not None and base_sent:
            parts.append(f"sends {sent / base_sent:.2f} × its bytes{_paper_text(line, group_claims)}")
        if parts:
            yield f"{line.label} {join_words(parts)}."
    if len(compared) > _MOST_LINES:
        yield f"The tables have {len(compared) - _MOST_LINES} more."


def _paper_text(line: ReportedLine, group_claims: Sequence[Claim]) -> str:
    """Return what the literature says of the volume, if there is a claim on this line."""
    own = (claim for claim in group_claims if claim.label == line.label)
    claim = next((claim for claim in own if claim.claim.startswith(_VOLUME)), None)
    if claim is None:
        return ""
    return ", as the paper says" if claim.agrees else f"; the paper says {claim.expected:.2f} ×"


def _checkpointing(lines: Sequence[ReportedLine]) -> Iterator[str]:
    """Yield how much memory each kind of checkpointing saves over the same run without, and what that costs."""
    for line in lines:
        kind = line.row.get("checkpointing")
        plain = next((other for other in lines if _is_plain(other, line)), None)
        if kind in (None, "none") or plain is None:
            continue
        parts = []
        after, before = line.row.get("activation_bytes"), plain.row.get("activation_bytes")
        if after is not None and before:
            parts.append(f"{percent_text(1 - after / before)} off the activations")
        if line.peak is not None and plain.peak:
            parts.append(f"{percent_text(1 - line.peak / plain.peak)} off the peak")
        if parts:
            cost = f", and {_cost_text(line, plain)}" if _has_spread(line) and _has_spread(plain) else ""
            yield f"Checkpointing {kind} takes {join_words(parts)} of {plain.label}{cost}."


def _cost_text(line: ReportedLine, plain: ReportedLine) -> str:
    if _unsettled(line, plain):
        return "costs no speed that the spreads do not cover"
    lost = 1 - line.speed / plain.speed
    return f"costs {percent_text(lost)} of its speed" if lost > 0 else f"was {percent_text(-lost)} faster here"


def _is_plain(other: ReportedLine, line: ReportedLine) -> bool:
    same = all(
        other.row.get(name) == line.row.get(name) for name in (*PARTITION_COLUMNS, "micro_batch", "offload_activations")
    )
    return same and other.row.get("checkpointing") in (None, "none")


def _bubbles(lines: Sequence[ReportedLine]) -> Iterator[str]:
    pipelines = [
        line for line in lines if None not in (line.row.get("pipeline_bubble"), line.row.get("pipeline_bubble_theory"))
    ]
    parts = [
        f"{line.label} {line.row['pipeline_bubble']:.2f} (formula {line.row['pipeline_bubble_theory']:.2f})"
        for line in pipelines
    ]
    if parts:
        yield f"Pipelines were idle for this part of their working time: {join_words(parts[:_MOST_LINES])}."


def _at_least(size: int) -> str:
    """Return a size in bytes as text, rounded up, so that what is recommended for it does fit."""
    unit = byte_unit([size])
    number = size / unit.size
    decimals = 0 if number >= 1000 or unit.name == "B" else 1 if number >= 100 else 2
    return f"{math.ceil(number * 10**decimals) / 10**decimals:,.{decimals}f} {unit.name}"


def _share(part: int | None, whole: int | None) -> str:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else "an unknown part"


def _times(line: ReportedLine, other: ReportedLine) -> str:
    mark = " (the spreads meet)" if _unsettled(line, other) else ""
    return f"{line.speed / other.speed:.2f}{mark}"
