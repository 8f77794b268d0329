"""The order in which a rank of a pipeline takes its passes, as torch's schedules have it. Imports no torch."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from harness.layout.layout import Layout

PassKind = Literal["forward", "backward", "inputs", "weights"]  # a backward as a whole, or its two halves

PendingCounts = tuple[int, ...]  # of passes, by the rank's own stages


def schedule_order(layout: Layout, micro_batches: int, place: int) -> Iterator[tuple[PassKind, int]]:
    """What the rank at this place of the pipeline does in a step, and through which of its own stages.

    Forwards to warm up, then a forward and a backward in turn, then the backwards that are left. Zero bubble halves
    the backward: what is for weights comes `place` passes later, and in the first stage all of it.
    """
    p, v = layout.pp, layout.virtual_stages
    schedule = layout.schedule if p > 1 else "1f1b"  # on its own a rank has nothing to wait for
    per_round, total = layout.micro_batches_per_round(micro_batches), v * micro_batches
    looped = (v - 1) * per_round
    warm_up = {
        "gpipe": total,
        "1f1b": p - 1 - place,
        "interleaved_1f1b": looped + 2 * (p - 1 - place),
        "zero_bubble": looped + p - 1 - place,
    }[schedule]
    up = [number // per_round % v for number in range(total)]
    down = [v - 1 - own for own in up]
    for own in up[:warm_up]:
        yield "forward", own
    for number in range(total + place):
        for own in up[warm_up + number : warm_up + number + 1]:
            yield "forward", own
        for own in down[number : number + 1]:
            if schedule != "zero_bubble":
                yield "backward", own
            elif place + own > 0:
                yield "inputs", own
        if schedule == "zero_bubble" and number >= place:
            own = down[number - place]
            yield "weights" if place + own > 0 else "backward", own


class BackwardStart(NamedTuple):
    """The start of a backward, or of a half, through stage `own` of the rank's, and what there is by then."""

    kind: PassKind
    own: int
    waiting: PendingCounts  # passes kept for their backward
    halved: PendingCounts  # passes kept for the half that is for weights
    finished: PendingCounts
    forwards: PendingCounts

    @property
    def sent_back(self) -> PendingCounts:
        """Passes whose input's gradient is made."""
        return tuple(map(sum, zip(self.halved, self.finished, strict=True)))


def backward_starts(layout: Layout, micro_batches: int, place: int) -> list[BackwardStart]:
    """The backwards of a rank's step; of those with the same passes kept the last, as what was sent may pile up."""
    found: dict[object, BackwardStart] = {}
    waiting, halved, finished, forwards = ([0] * layout.virtual_stages for _ in range(4))
    for kind, own in schedule_order(layout, micro_batches, place):
        if kind == "forward":
            waiting[own] += 1
            forwards[own] += 1
            continue
        now = BackwardStart(kind, own, tuple(waiting), tuple(halved), tuple(finished), tuple(forwards))
        found[kind, own, now.waiting, now.halved, tuple(map(bool, finished))] = now
        (halved if kind == "weights" else waiting)[own] -= 1
        (halved if kind == "inputs" else finished)[own] += 1
    return list(found.values())


def bubble_ratio(layout: Layout, micro_batches: int) -> float:
    """Idle time of a stage in units of its working time, were all stages equal and communication free.

    (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved (arXiv 2104.04473, section 2.2). Zero bubble leaves
    (p - 1)(F + B - W) of m (F + B + W) (ZB-H1, arXiv 2401.10241, table 2), a third of that where forward, backward for
    inputs and backward for weights take equally long.
    """
    fraction = (layout.pp - 1) / (layout.virtual_stages * micro_batches)
    return fraction / 3 if layout.schedule == "zero_bubble" else fraction


def max_in_flight_micro_batches(layout: Layout, micro_batches: int, place: int) -> int:
    """The most passes through one of its stages that the rank at this place of the pipeline keeps for backward.

    As torch's schedules order them: GPipe all, 1F1B as many as there are stages from here on, the looped ones their
    warm-up and one more; zero bubble keeps each until its weights' gradients are made, `place` passes later.
    """
    p, v = layout.pp, layout.virtual_stages
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "1f1b":
        return min(micro_batches, p - place)
    warm_up = (v - 1) * layout.micro_batches_per_round(micro_batches)
    if layout.schedule == "interleaved_1f1b":
        return min(v * micro_batches, warm_up + 2 * (p - 1 - place) + 1)
    return min(v * micro_batches, warm_up + (p - 1 - place) + 1 + place)
