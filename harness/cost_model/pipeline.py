"""The order in which a pipeline's rank runs its passes, as torch's schedules have it. Imports no torch."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from harness.config.strategy import V_SCHEDULES, Schedule
from harness.layout.layout import Layout, micro_batches_per_round

PassKind = Literal["forward", "backward", "inputs", "weights"]  # a backward as a whole, or its two halves

StagePass = tuple[PassKind, int]  # a pass through one of the rank's own stages, by its index among them

# The passes through the two stages of a rank of a V-shaped schedule: on the way to the last rank, and back.
FORWARDS: tuple[StagePass, StagePass] = (("forward", 0), ("forward", 1))
BACKWARDS: tuple[StagePass, StagePass] = (("backward", 0), ("backward", 1))
INPUTS: tuple[StagePass, StagePass] = (("inputs", 0), ("inputs", 1))
WEIGHTS: tuple[StagePass, StagePass] = (("weights", 0), ("weights", 1))

PassCounts = tuple[int, ...]  # the number of passes through each of the rank's own stages


def schedule_order(schedule: Schedule, p: int, v: int, micro_batches: int, pp_rank: int) -> Iterator[StagePass]:
    """Yield the passes of a step on this rank of the pipeline, and through which of its own `v` stages each goes.

    Forwards warm up, then a forward and a backward take turns, then come the backwards that are left. Zero bubble
    halves the backward: the half for weights comes `pp_rank` passes later, and in the first stage with all of it.
    """
    if schedule in V_SCHEDULES:
        for kind, stage in v_passes(schedule, p, micro_batches, pp_rank):
            if pp_rank + stage > 0 or kind in ("forward", "backward"):
                yield kind, stage
            elif kind == "weights":
                yield "backward", stage
        return
    per_round, total = micro_batches_per_round(p, micro_batches), v * micro_batches
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


def v_passes(schedule: Schedule, p: int, micro_batches: int, pp_rank: int) -> Iterator[StagePass]:
    """Yield the passes of a rank whose first stage (0) is on the way to the last rank, and its second one (1) back.

    ZB-V halves all backwards (arXiv 2401.10241, section 6), DualPipeV some of its first and last ones. Each forward
    of DualPipeV has a whole backward behind it, which torch runs after it and not at the same time.
    """
    ahead, behind = p - pp_rank, pp_rank
    (out, back), (inputs_out, inputs_back), (weights_out, weights_back) = FORWARDS, INPUTS, WEIGHTS
    backward_out, backward_back = BACKWARDS
    if schedule == "zbv":
        turn = [back, inputs_back, weights_back]
        yield from [*[out] * (2 * ahead - 1), *[back, out] * behind, *turn * ahead]
        for number in range(micro_batches - p):
            yield from [*[out] * (number < micro_batches - p - ahead + 1), inputs_out, weights_out, *turn]
        yield from [*[inputs_out, inputs_back] * behind, *[inputs_out, weights_out] * ahead]
        yield from [*[weights_back] * behind, *[weights_out] * behind]
        return
    yield from [*[out] * (2 * ahead - 2), *[out, back] * (behind + 1)]
    yield from [inputs_back, weights_back, back] * (ahead - 1)
    yield from [out, backward_back, back, backward_out] * (micro_batches - 2 * p + behind + 1)
    yield from [backward_back, back, backward_out] * (ahead - 1)
    stages = [1, 0] * (behind + 1)
    yield from map(BACKWARDS.__getitem__, stages[: behind + 1])
    yield from map(INPUTS.__getitem__, stages[behind + 1 :])
    for number, stage in enumerate([*stages[behind + 1 :], *[0] * (ahead - 1)]):
        yield from [WEIGHTS[stage], *[inputs_out] * (number < ahead - 1)]


def split_passes(layout: Layout, micro_batches: int, pp_rank: int) -> tuple[int, ...]:
    """Return how many backwards through each of a rank's own stages a step runs in two halves.

    DualPipeV halves as many of however many micro-batches.
    """
    if not layout.is_v_shaped or layout.schedule == "zbv":
        return (micro_batches * layout.splits_backward,) * layout.virtual_stages
    order = list(v_passes(layout.schedule, layout.pp, 2 * layout.pp, pp_rank))
    return tuple(order.count(("inputs", stage)) for stage in range(layout.virtual_stages))


REPEATING_ROUNDS = 4  # of `pp` micro-batches, after which the passes of a schedule only repeat


class BackwardStart(NamedTuple):
    """The start of a backward, or of one half of it, and the rank's passes in the step up to that moment."""

    kind: PassKind
    stage: int  # index among the rank's own stages
    pending: PassCounts  # kept for their backward, this one included
    awaiting_weight_grad: PassCounts  # kept for the half of their backward that is for weights
    done: PassCounts  # whose backward is complete
    forwards: PassCounts  # whose forward has run
    is_last: bool = False  # whether it is the stage's last one of the step
    holds_sent: bool = False  # whether the rank still refers to the last send of its warm-up, whose backward is done

    def later(self, micro_batches: int) -> "BackwardStart":
        """Return the same start after so many more micro-batches have gone through every stage."""
        done, forwards = (tuple(number + micro_batches for number in counts) for counts in (self.done, self.forwards))
        return self._replace(done=done, forwards=forwards)


def backward_starts(layout: Layout, micro_batches: int, pp_rank: int) -> list[BackwardStart]:
    """Return the starts of a rank's backwards in a step.

    Several starts with the same kept passes are represented by the last, because sent tensors may accumulate. torch's
    Schedule1F1B refers to the last send of its warm-up, that of the last forward but one, until its cool-down.
    """
    schedule = layout.schedule if layout.pp_enabled else "1f1b"
    pp_rank = 0 if schedule == "gpipe" else pp_rank  # all of its ranks begin with all forwards
    return list(_backward_starts(schedule, layout.pp, layout.virtual_stages, micro_batches, pp_rank))


@lru_cache(maxsize=8192)
def _backward_starts(
    schedule: Schedule, pp: int, virtual_stages: int, micro_batches: int, pp_rank: int
) -> tuple[BackwardStart, ...]:
    few = REPEATING_ROUNDS * pp
    if schedule != "gpipe" and micro_batches > few and micro_batches % pp == 0:
        # More rounds repeat the same passes; once every stage has gradients, their starts come so much later.
        starts_of_few = _backward_starts(schedule, pp, virtual_stages, few, pp_rank)
        return tuple(start.later(micro_batches - few) if all(start.done) else start for start in starts_of_few)
    starts: dict[object, BackwardStart] = {}
    warm_up = pp - pp_rank
    pending, awaiting, done, forwards = ([0] * virtual_stages for _ in range(4))
    for kind, stage in schedule_order(schedule, pp, virtual_stages, micro_batches, pp_rank):
        if kind == "forward":
            pending[stage] += 1
            forwards[stage] += 1
            continue
        is_last = done[stage] + 1 == micro_batches
        holds_sent = schedule == "1f1b" and 0 < warm_up - 1 <= done[stage] <= micro_batches - warm_up
        passes = (tuple(pending), tuple(awaiting), tuple(done), tuple(forwards))
        start = BackwardStart(kind, stage, *passes, is_last, holds_sent)
        starts[kind, stage, start.pending, start.awaiting_weight_grad, tuple(map(bool, done)), is_last] = start
        (awaiting if kind == "weights" else pending)[stage] -= 1
        (awaiting if kind == "inputs" else done)[stage] += 1
    return tuple(starts.values())


def bubble_ratio(layout: Layout, micro_batches: int) -> float:
    """Return a stage's idle time in units of its working time, if all stages are equal and communication is free.

    It is (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved (arXiv 2104.04473, section 2.2). Zero bubble
    leaves (p - 1)(F + B - W) of m (F + B + W) (ZB-H1, arXiv 2401.10241, table 2), which is a third of that where
    forward, backward for inputs and backward for weights take equally long. ZB-V, with v = 2, then leaves as much: its
    ranks end one after another, and wait for each other before the update. DualPipeV leaves (p - 1)(F&B + B - 3 W) of a
    stage, where F&B is a forward with a backward beside it (DualPipe, arXiv 2412.19437, table 2): in torch as long as
    both, one after the other, and neither's result is sent before the end.
    """
    fraction = (layout.pp - 1) / (layout.virtual_stages * micro_batches)
    if layout.schedule == "dualpipev":
        fraction *= layout.virtual_stages
    return fraction / 3 if layout.splits_backward else fraction


def max_in_flight_micro_batches(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Return the most passes through its stages that this rank of the pipeline keeps for backward at once.

    Zero bubble keeps each until its weights' gradients are computed.
    """
    starts = backward_starts(layout, micro_batches, pp_rank)
    return max(sum(start.pending) + sum(start.awaiting_weight_grad) for start in starts)
