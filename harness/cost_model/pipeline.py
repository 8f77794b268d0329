"""The order in which a pipeline's rank runs its passes, as torch's schedules have it. Imports no torch."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from harness.layout.layout import Layout

PassKind = Literal["forward", "backward", "inputs", "weights"]  # a backward as a whole, or its two halves

PassCounts = tuple[int, ...]  # the number of passes through each of the rank's own stages


def schedule_order(layout: Layout, micro_batches: int, pp_rank: int) -> Iterator[tuple[PassKind, int]]:
    """Yield the passes of a step on this rank of the pipeline, and through which of its own stages each goes.

    Forwards warm up, then a forward and a backward take turns, then come the backwards that are left. Zero bubble
    halves the backward: the half for weights comes `pp_rank` passes later, and in the first stage with all of it.
    """
    p, v = layout.pp, layout.virtual_stages
    schedule = layout.schedule if layout.pp_enabled else "1f1b"  # a single rank has nothing to wait for
    per_round, total = layout.micro_batches_per_round(micro_batches), v * micro_batches
    first_rounds = (v - 1) * per_round
    warm_up = {
        "gpipe": total,
        "1f1b": p - 1 - pp_rank,
        "interleaved_1f1b": first_rounds + 2 * (p - 1 - pp_rank),
        "zero_bubble": first_rounds + p - 1 - pp_rank,
    }[schedule]
    forward_stages = [number // per_round % v for number in range(total)]
    backward_stages = [v - 1 - stage for stage in forward_stages]
    for stage in forward_stages[:warm_up]:
        yield "forward", stage
    for number in range(total + pp_rank):
        for stage in forward_stages[warm_up + number : warm_up + number + 1]:
            yield "forward", stage
        for stage in backward_stages[number : number + 1]:
            if schedule != "zero_bubble":
                yield "backward", stage
            elif pp_rank + stage > 0:
                yield "inputs", stage
        if schedule == "zero_bubble" and number >= pp_rank:
            stage = backward_stages[number - pp_rank]
            yield "weights" if pp_rank + stage > 0 else "backward", stage


class BackwardStart(NamedTuple):
    """The start of a backward, or of one half of it, and the rank's passes in the step up to that moment."""

    kind: PassKind
    stage: int  # index among the rank's own stages
    pending: PassCounts  # kept for their backward, this one included
    awaiting_weight_grad: PassCounts  # kept for the half of their backward that is for weights
    done: PassCounts  # whose backward is complete
    forwards: PassCounts  # whose forward has run


def backward_starts(layout: Layout, micro_batches: int, pp_rank: int) -> list[BackwardStart]:
    """Return the starts of a rank's backwards in a step.

    Several starts with the same kept passes are represented by the last, because sent tensors may accumulate.
    """
    starts: dict[object, BackwardStart] = {}
    pending, awaiting, done, forwards = ([0] * layout.virtual_stages for _ in range(4))
    for kind, stage in schedule_order(layout, micro_batches, pp_rank):
        if kind == "forward":
            pending[stage] += 1
            forwards[stage] += 1
            continue
        start = BackwardStart(kind, stage, tuple(pending), tuple(awaiting), tuple(done), tuple(forwards))
        starts[kind, stage, start.pending, start.awaiting_weight_grad, tuple(map(bool, done))] = start
        (awaiting if kind == "weights" else pending)[stage] -= 1
        (awaiting if kind == "inputs" else done)[stage] += 1
    return list(starts.values())


def bubble_ratio(layout: Layout, micro_batches: int) -> float:
    """Return a stage's idle time in units of its working time, if all stages are equal and communication is free.

    It is (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved (arXiv 2104.04473, section 2.2). Zero bubble
    leaves (p - 1)(F + B - W) of m (F + B + W) (ZB-H1, arXiv 2401.10241, table 2), which is a third of that where
    forward, backward for inputs and backward for weights take equally long.
    """
    fraction = (layout.pp - 1) / (layout.virtual_stages * micro_batches)
    return fraction / 3 if layout.schedule == "zero_bubble" else fraction


def max_in_flight_micro_batches(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Return the most passes through its stages that this rank of the pipeline keeps for backward at once.

    torch's schedules order them so: GPipe keeps all, 1F1B as many as there are stages from this one on, the looped
    schedules their warm-up and one more; zero bubble keeps each until its weights' gradients are computed, `pp_rank`
    passes later.
    """
    p, v = layout.pp, layout.virtual_stages
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "1f1b":
        return min(micro_batches, p - pp_rank)
    warm_up = (v - 1) * layout.micro_batches_per_round(micro_batches)
    if layout.schedule == "interleaved_1f1b":
        return min(v * micro_batches, warm_up + 2 * (p - 1 - pp_rank) + 1)
    return min(v * micro_batches, warm_up + (p - 1 - pp_rank) + 1 + pp_rank)
