"""The search for the fastest layouts that fit, with lower bounds on memory that skip what cannot win. No torch.

Candidates are taken from the fastest on. Each that needs less memory than all before it is on the front of memory
against speed. Once enough of them fit, only a candidate that could still be on the front is worth an exact estimate of
its memory, and its lower bounds say whether it could. Where state alone exceeds MOST_DEVICES devices, not even the time
is worked out.

A bound is what one rank of the pipeline has at one moment of a step, so that the highest rank's peak is never below it,
and takes much less time than an exact estimate.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from harness.config.schema import RunConfig
from harness.cost_model.memory import WORKSPACE_BYTES
from harness.cost_model.pipeline import max_in_flight_micro_batches
from harness.cost_model.prediction import Prediction
from harness.cost_model.rank_memory import RankStep, rank_steps
from harness.cost_model.stack_memory import stack_steps, workspace_bytes
from harness.cost_model.timing.interval import TIE
from harness.layout.layout import Layout
from harness.planner.space import SearchedSpace, candidates, plan_problems, predict
from harness.util.text import UserError

BEST = 5  # candidates that fit, and choices that are shown

MOST_DEVICES = 2  # devices' memory up to which the front is drawn

ALIKE = 0.01  # a difference of peaks for which nobody divides a model along one more axis

LowerBound = Callable[[Prediction], int]

Candidate = tuple[Prediction, int]  # with the bytes that its state takes at least


@dataclass
class SearchResult:
    """The best candidates of a search, and how it came to them."""

    considered: int = 0  # candidates before the rules of a run
    beyond: int = 0  # of them, those whose state alone exceeds MOST_DEVICES devices' memory
    valid: int = 0  # of the others, those that could run
    memory_estimates: int = 0  # exact ones; the lower bound spared all others
    best: list[Prediction] = field(default_factory=list)  # the fastest that fit, fastest first
    refuted: list[Prediction] = field(default_factory=list)  # fast ones that fit by their peak, but not simulated
    front: list[Prediction] = field(default_factory=list)  # the fastest in its memory, fastest first, fitting or not
    problems: Counter[str] = field(default_factory=Counter)  # rules that candidates break, with their number

    @property
    def device_front(self) -> list[Prediction]:
        """The layouts of the front without those beside which a faster one needs no more of a device."""
        least = itertools.accumulate([entry.device_bytes for entry in self.front], min, initial=math.inf)
        return [entry for entry, before in zip(self.front, least, strict=False) if entry.device_bytes < before]

    @property
    def choices(self) -> list[Prediction]:
        """The fastest that is likely to fit, and slower ones that need clearly less memory than all before them.

        Where none is likely to fit they begin with the fastest that may fit.
        """
        possible = [entry for entry in self.best + self.front * bool(self.best) if entry.verdict.fits != "no"]
        possible.sort(key=lambda entry: entry.step_seconds)
        likely = [entry for entry in possible if entry.verdict.fits == "likely"]
        chosen = (likely or possible)[:1]
        for entry in possible:
            is_behind = entry.step_seconds >= chosen[0].step_seconds and len(chosen) < BEST
            if is_behind and entry.memory.peak_bytes < (1 - ALIKE) * chosen[-1].memory.peak_bytes:
                chosen.append(entry)
        return chosen


def optimizer_step_bytes(step: RankStep) -> int:
    """Return bytes of the optimizer's step, which depend on layout and micro-batch alone, whatever the checkpointing.

    They are model state, and buffers that live as long.
    """
    return step.lasting_bytes + step.outside.total


def backward_start_bytes(step: RankStep) -> int:
    """Return bytes when a backward starts.

    A rank keeps the activations of all passes in flight, or those of the last stage and the loss.
    """
    own = step.sharding
    in_flight = max_in_flight_micro_batches(own.layout, own.micro_batches, step.pp_ranks[0])
    passes = in_flight - own.layout.splits_backward
    sizes = [stage.before_backward - stage.received_input_bytes for stage in own.activations]
    at_loss = (sizes[-1] + own.activations[-1].loss_bytes) * own.stages[-1].holds_head
    return step.lasting_bytes + max(passes * min(sizes), at_loss)


def lower_bound(of_rank: Callable[[RankStep], int], prediction: Prediction) -> int:
    """Return bytes of the first or of the last kind of the pipeline's ranks, with workspaces of matrix products.

    A layout that breaks a rule of the model's stages has no bound.
    """
    config, layout, cluster, memory = prediction.config, prediction.layout, prediction.cluster, prediction.stack.memory
    try:
        if prediction.has_own_memory:
            steps, workspaces = rank_steps(config, layout, prediction.widths, cluster.device), WORKSPACE_BYTES
        else:
            steps = stack_steps(config, layout, memory)
            workspaces = workspace_bytes(memory, cluster.hardware.compute_capability)
        highest = max(map(of_rank, steps[:: max(1, len(steps) - 1)]), default=0)
    except UserError:
        return 0
    return highest + (workspaces if cluster.device == "cuda" else 0)


# The quickest first.
LOWER_BOUNDS: tuple[LowerBound, ...] = (
    partial(lower_bound, optimizer_step_bytes),
    partial(lower_bound, backward_start_bytes),
)


def search(space: SearchedSpace, best: int = BEST, bounds: Sequence[LowerBound] = LOWER_BOUNDS) -> SearchResult:
    """Return the fastest layouts of a model on a cluster, those that fit and those on the front of memory."""
    result = SearchResult()
    valid: list[Candidate] = []
    for _, group in itertools.groupby(candidates(space), _state):
        alike = [predict(config, layout, space.cluster, space.stack) for config, layout in group]
        state_bytes = bounds[0](alike[0]) if bounds else 0
        result.considered += len(alike)
        if state_bytes > MOST_DEVICES * alike[0].available_bytes:
            result.beyond += len(alike)
            continue
        problems = [next(plan_problems(prediction), None) for prediction in alike]
        valid += [(entry, state_bytes) for entry, problem in zip(alike, problems, strict=True) if problem is None]
        result.problems.update(problem for problem in problems if problem is not None)
    result.valid = len(valid)
    rank(valid, result, best, bounds[1:])
    return result


def _state(candidate: tuple[RunConfig, Layout]) -> tuple[Layout, int]:
    """Return what decides the bytes of a candidate's state; those of one layout follow each other."""
    config, layout = candidate
    return layout, config.train.micro_batch


def gains_nothing(prediction: Prediction, faster: Iterable[Prediction]) -> bool:
    """Return whether a layout ties with a faster one that divides the model along fewer axes in no more memory."""
    return any(
        prediction.step_seconds <= (1 + TIE) * entry.step_seconds
        and entry.layout.model_axes < prediction.layout.model_axes
        and entry.memory.peak_bytes <= (1 + ALIKE) * prediction.memory.peak_bytes
        for entry in faster
    )


def rank(candidates: Iterable[Candidate], result: SearchResult, best: int, bounds: Sequence[LowerBound]) -> None:
    """Fill in the best candidates and the front, from the fastest on."""
    smallest = math.inf

    def is_needless(at_least: int, prediction: Prediction) -> bool:
        """Return whether a candidate of at least so many bytes is neither on the front nor among the best."""
        available = prediction.available_bytes
        is_worse = at_least >= smallest and (len(result.best) >= best or at_least > available)
        return is_worse or at_least > MOST_DEVICES * available

    for prediction, state_bytes in sorted(candidates, key=lambda candidate: candidate[0].step_seconds):
        if is_needless(state_bytes, prediction) or any(is_needless(bound(prediction), prediction) for bound in bounds):
            continue
        result.memory_estimates += 1
        if not prediction.room.host_holds(prediction.memory):
            continue
        if len(result.best) < best and prediction.fits and not gains_nothing(prediction, result.best):
            result.best.append(prediction)
        peak = prediction.memory.peak_bytes
        if peak < smallest and peak <= MOST_DEVICES * prediction.available_bytes:
            smallest = peak
            result.front.append(prediction)
