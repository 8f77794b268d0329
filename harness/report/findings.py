"""The report's first sentences: who wins, what it costs and why, each with the figures of the rows that say so."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records.schema import Record, Row
from harness.report import frame, summary_sentences
from harness.report.best import pareto_front
from harness.report.claim_peers import DIVISION, Claim
from harness.report.claims import claims
from harness.report.document import BulletList, Paragraph, Part, Section, section
from harness.report.spread import is_unsettled, spread
from harness.report.text import listed, percent
from harness.report.view import View

_MOST_GROUPS = 4  # settings that are told of

_MOST_LINES = 6  # of a group that are told one by one

_VOLUME = "bytes sent a step over DDP's"  # how the claim begins


@dataclass(frozen=True)
class Line:
    """A line that is ok, as sentences speak of it."""

    label: str
    record: Record  # as merged
    baseline: str | None  # its label

    @property
    def row(self) -> Row:
        row: Row = self.record["row"]
        return row

    @property
    def speed(self) -> float:
        """Tokens a second of the whole world."""
        return float(self.row["tokens_per_second"])

    @property
    def peak(self) -> int | None:
        """Bytes, of the fullest rank."""
        peak: int | None = self.row.get("peak_allocated_bytes")
        return peak

    @property
    def fast(self) -> str:
        return f"{self.speed:,.0f} tokens/s"


def findings(view: View, fits_in: int | None = None) -> list[Section]:
    """In short: by setting the fastest and the smallest, what the rest costs, and what to take.

    fits_in: bytes of a device that the recommendation is for; by default one for every size of device.
    """
    groups = _groups(view)
    told = sorted(groups.values(), key=_weight, reverse=True)[:_MOST_GROUPS]
    parts: list[Part] = [
        *_bullets([*summary_sentences.memory_wall_sentences(view), *summary_sentences.scaling_sentences(view)])
    ]
    for place, records in enumerate(told):
        parts += [Paragraph(_heading(records, groups))] if len(groups) > 1 else []
        parts += _bullets(_sentences(_lines(records), fits_in, in_full=place == 0))
    untold = len(groups) - len(told)
    parts += (
        [Paragraph(f"{frame.counted(untold, 'smaller group')} of comparable runs: see the tables.")] if untold else []
    )
    return section(
        "In short",
        *parts,
        *_bullets([*summary_sentences.prediction_sentences(view), *summary_sentences.failure_sentences(view)]),
    )


def _bullets(sentences: Iterable[str]) -> list[BulletList]:
    items = [("", sentence) for sentence in sentences]
    return [BulletList(items)] if items else []


def _groups(view: View) -> dict[tuple[Any, ...], list[Record]]:
    """Lines that a reader may choose between: of one setting on as many ranks."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for line in view.lines:
        row = line["row"]
        if row["status"] == "ok" and row.get("tokens_per_second"):
            found.setdefault((*frame.comparability_key(row), row.get("world_size")), []).append(line)
    return {key: lines for key, lines in found.items() if len(lines) > 1}


def _weight(lines: Sequence[Record]) -> tuple[int, int]:
    """The group with most lines is told first and in full, of equals the one on most ranks."""
    return len(lines), lines[0]["row"].get("world_size") or 0


def _lines(records: Sequence[Record]) -> list[Line]:
    """By labels that tell them apart among themselves."""
    table = frame.records_frame(records)
    named = zip(frame.values(table, "label"), records, frame.values(table, "baseline"), strict=True)
    return [Line(label, record, baseline) for label, record, baseline in named]


def _heading(lines: Sequence[Record], groups: dict[tuple[Any, ...], list[Record]]) -> str:
    """What sets the group apart from the others."""
    shown = {
        "model": "{}",
        "parameters": "{:,} parameters",
        "precision": "{}",
        "global_batch": "batch {}",
        "seq_len": "sequences of {}",
        "measured_on": "on {}",
        "world_size": "world size {}",
    }
    differing = [name for name in shown if len({group[0]["row"].get(name) for group in groups.values()}) > 1]
    row = lines[0]["row"]
    known = [shown[name].format(row[name]) for name in differing if row.get(name) is not None]
    return f"Of {', '.join(known) or 'a further setting'}:"


def _sentences(lines: Sequence[Line], fits_in: int | None, in_full: bool = True) -> Iterator[str]:
    by_speed = sorted(lines, key=lambda line: -line.speed)
    if len(lines) > 1 and all(_timed(line) for line in lines):
        yield _fastest(by_speed)
    if all(line.peak is not None for line in lines):
        yield _smallest(lines, by_speed[0])
        if fits_in is not None:
            yield _fitting(lines, fits_in)
        elif all(_timed(line) for line in lines):
            yield from _ladder(_front(lines))
    if in_full:
        found = claims([line.record for line in lines], [line.label for line in lines])
        yield from _against_baseline(lines, found)
        yield from itertools.islice(_checkpointing(lines), _MOST_LINES)
        yield from _bubbles(lines)


def _fastest(by_speed: Sequence[Line]) -> str:
    first = by_speed[0]
    rivals = [line for line in by_speed[1:] if _unsettled(line, first)]
    sure = _spread_text(first)
    if rivals:
        names = listed([line.label for line in rivals[:_MOST_LINES]])
        more = f" or {len(rivals) - _MOST_LINES} more" if len(rivals) > _MOST_LINES else ""
        return (
            f"Fastest by its median is {first.label}: {first.fast}{sure}, but the spreads leave open whether"
            f" {names}{more} {'are' if len(rivals) > 1 else 'is'} as fast."
        )
    second = by_speed[1]
    return (
        f"{first.label} is fastest: {first.fast}{sure}, {first.speed / second.speed:.2f} × of {second.label}, the next."
    )


def _timed(line: Line) -> bool:
    """Whether the speed is of enough steps or runs to tell how sure it is."""
    return spread(line.row) is not None


def _unsettled(line: Line, other: Line) -> bool:
    return is_unsettled(line.speed / other.speed, spread(line.row), spread(other.row))


def _spread_text(line: Line) -> str:
    between = line.row.get("between_runs")
    return f" (± {percent(between)} over {line.row['runs_alike']} runs)" if between is not None else ""


def _smallest(lines: Sequence[Line], fastest: Line) -> str:
    small = min(lines, key=lambda line: (line.peak or 0, -line.speed))
    text = f"{small.label} needs the least memory: {frame.bytes_text(small.peak or 0)} at the peak of its fullest rank"
    if not (_timed(small) and _timed(fastest)):
        return text + "."
    if small is fastest:
        return text + ", the fastest too."
    return (
        f"{text}, {_share(small.peak, fastest.peak)} of {fastest.label}'s, at {_times(small, fastest)} of its tokens/s."
    )


def _front(lines: Sequence[Line]) -> list[Line]:
    """The lines that none beats in both speed and peak memory, from the fastest to the smallest."""
    best = pareto_front([(float(line.peak or 0), line.speed) for line in lines])
    distinct: dict[tuple[float, int | None], Line] = {}
    for line, is_best in zip(lines, best, strict=True):
        if is_best:
            distinct.setdefault((line.speed, line.peak), line)
    return sorted(distinct.values(), key=lambda line: -line.speed)


def _ladder(kept: Sequence[Line]) -> Iterator[str]:
    """What to take for every size of device, if tokens a second are what counts."""
    steps = [f"from {_at_least(line.peak or 0)} {line.label} ({line.fast})" for line in reversed(kept)]
    if len(steps) > _MOST_LINES:
        steps = [*steps[: _MOST_LINES - 1], "…", steps[-1]]
    if len(kept) > 1:
        yield (
            f"The fastest that a device's memory allows: {', '.join(steps)}. In less than the first nothing measured"
            " here fits."
        )


def _fitting(lines: Sequence[Line], fits_in: int) -> str:
    limit = frame.bytes_text(fits_in)
    fitting = [line for line in lines if line.peak is not None and line.peak <= fits_in]
    if not fitting:
        least = min(line.peak or 0 for line in lines)
        return f"Nothing measured here fits in {limit}: the least is {frame.bytes_text(least)}."
    if not all(_timed(line) for line in fitting):
        return f"{len(fitting)} of {len(lines)} fit in {limit}: {listed([line.label for line in fitting])}."
    first, *others = sorted(fitting, key=lambda line: -line.speed)
    rivals = [line.label for line in others if _unsettled(line, first)]
    text = f"Of the {len(fitting)} of {len(lines)} that fit in {limit}, {first.label} is fastest: {first.fast} in"
    text += f" {frame.bytes_text(first.peak or 0)}"
    return text + (
        f"; the spreads leave open whether {listed(rivals[:_MOST_LINES])} would be as fast." if rivals else "."
    )


def _against_baseline(lines: Sequence[Line], found: Sequence[Claim]) -> Iterator[str]:
    """What each line holds, runs and sends in proportion to the one it is measured against, checkpointed alike."""
    by_label = {line.label: line for line in lines}
    told = [line for line in lines if line.baseline in by_label and line.baseline != line.label]
    kind = {line.label: line.row.get("checkpointing") for line in lines}
    alike = [line for line in told if kind[line.label] == kind[str(line.baseline)]]
    for line in alike[:_MOST_LINES]:
        base = by_label[str(line.baseline)]
        parts = []
        if line.peak is not None and base.peak:
            parts.append(f"holds {_share(line.peak, base.peak)} of {base.label}'s peak")
        if _timed(line) and _timed(base):
            parts.append(f"runs at {_times(line, base)} of its tokens/s")
        sent, its = line.row.get("communication_bytes"), base.row.get("communication_bytes")
        if sent is not None and its:
            parts.append(f"sends {sent / its:.2f} × its bytes{_paper(line, found)}")
        if parts:
            yield f"{line.label} {listed(parts)}."
    if len(alike) > _MOST_LINES:
        yield f"The tables have {len(alike) - _MOST_LINES} more."


def _paper(line: Line, found: Sequence[Claim]) -> str:
    """What the literature says of the volume, if a claim was made of this line."""
    claim = next((one for one in found if one.label == line.label and one.claim.startswith(_VOLUME)), None)
    if claim is None:
        return ""
    return ", as the paper says" if claim.agrees else f"; the paper says {claim.expected:.2f} ×"


def _checkpointing(lines: Sequence[Line]) -> Iterator[str]:
    """What each kind takes off the memory of the same run without, and what that costs."""
    for line in lines:
        kind = line.row.get("checkpointing")
        plain = next((other for other in lines if _is_plain(other, line)), None)
        if kind in (None, "none") or plain is None:
            continue
        parts = []
        kept, before = line.row.get("activation_bytes"), plain.row.get("activation_bytes")
        if kept is not None and before:
            parts.append(f"{percent(1 - kept / before)} off the activations")
        if line.peak is not None and plain.peak:
            parts.append(f"{percent(1 - line.peak / plain.peak)} off the peak")
        if parts:
            cost = f", and {_cost(line, plain)}" if _timed(line) and _timed(plain) else ""
            yield f"Checkpointing {kind} takes {listed(parts)} of {plain.label}{cost}."


def _cost(line: Line, plain: Line) -> str:
    if _unsettled(line, plain):
        return "costs no speed that the spreads do not cover"
    lost = 1 - line.speed / plain.speed
    return f"costs {percent(lost)} of its speed" if lost > 0 else f"was {percent(-lost)} faster here"


def _is_plain(other: Line, line: Line) -> bool:
    same = all(other.row.get(name) == line.row.get(name) for name in (*DIVISION, "micro_batch", "offload_activations"))
    return same and other.row.get("checkpointing") in (None, "none")


def _bubbles(lines: Sequence[Line]) -> Iterator[str]:
    found = [
        line for line in lines if line.row.get("bubble") is not None and line.row.get("bubble_formula") is not None
    ]
    parts = [f"{line.label} {line.row['bubble']:.2f} (formula {line.row['bubble_formula']:.2f})" for line in found]
    if parts:
        yield f"Pipelines were idle for this part of their working time: {listed(parts[:_MOST_LINES])}."


def _at_least(size: int) -> str:
    """A size as text that is no less than it, so that what is recommended for it does fit."""
    unit = frame.byte_unit([size])
    number = size / unit.size
    decimals = 0 if number >= 1000 or unit.name == "B" else 1 if number >= 100 else 2
    return f"{math.ceil(number * 10**decimals) / 10**decimals:,.{decimals}f} {unit.name}"


def _share(part: int | None, whole: int | None) -> str:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else "an unknown part"


def _times(line: Line, other: Line) -> str:
    unsure = " (the spreads meet)" if _unsettled(line, other) else ""
    return f"{line.speed / other.speed:.2f}{unsure}"
