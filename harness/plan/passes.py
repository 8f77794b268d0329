"""The order in which a rank of a pipeline takes its passes, as torch's schedules have it. Imports no torch."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from harness.layout import Layout
from harness.plan.pipeline import round_size

Kind = Literal["forward", "backward", "inputs", "weights"]  # a backward as a whole, or its two halves
Counts = tuple[int, ...]  # of passes, by the rank's own stages


def order(layout: Layout, micro_batches: int, place: int) -> Iterator[tuple[Kind, int]]:
    """What the rank at this place of the pipeline does in a step, and through which of its own stages.

    Forwards to warm up, then a forward and a backward in turn, then the backwards that are left. Zero bubble halves
    the backward: what is for weights comes `place` passes later, and in the first stage all of it.
    """
    p, v = layout.pp, layout.virtual_stages
    schedule = layout.schedule if p > 1 else "1f1b"  # on its own a rank has nothing to wait for
    per_round, total = round_size(layout, micro_batches), v * micro_batches
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


class Moment(NamedTuple):
    """The start of a backward, or of a half, through stage `own` of the rank's, and what there is by then."""

    kind: Kind
    own: int
    waiting: Counts  # passes kept for their backward
    halved: Counts  # passes kept for the half that is for weights
    finished: Counts
    forwards: Counts

    @property
    def sent_back(self) -> Counts:
        """Passes whose input's gradient is made."""
        return tuple(map(sum, zip(self.halved, self.finished, strict=True)))


def moments(layout: Layout, micro_batches: int, place: int) -> list[Moment]:
    """The backwards of a rank's step; of those with the same passes kept the last, as what was sent may pile up."""
    found: dict[object, Moment] = {}
    waiting, halved, finished, forwards = ([0] * layout.virtual_stages for _ in range(4))
    for kind, own in order(layout, micro_batches, place):
        if kind == "forward":
            waiting[own] += 1
            forwards[own] += 1
            continue
        now = Moment(kind, own, tuple(waiting), tuple(halved), tuple(finished), tuple(forwards))
        found[kind, own, now.waiting, now.halved, tuple(map(bool, finished))] = now
        (halved if kind == "weights" else waiting)[own] -= 1
        (halved if kind == "inputs" else finished)[own] += 1
    return list(found.values())
