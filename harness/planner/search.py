"""The search for the fastest layouts that fit, with a lower bound on memory that skips what cannot win. No torch.

Candidates are taken from the fastest on. Each that needs less memory than all before it is on the front of memory
against speed. Once enough of them fit, only a candidate that could still be on the front is worth an exact estimate of
its memory, and its lower bounds say whether it could. Where state alone exceeds MOST_DEVICES devices, not even the time
is worked out.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from harness.config.schema import RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.prediction import Prediction
from harness.hardware.described_cluster import DescribedCluster
from harness.layout.layout import Layout
from harness.planner.bounds import LOWER_BOUNDS
from harness.planner.problems import plan_problems, predict
from harness.planner.space import Restrictions, SearchedSpace, candidates
from harness.util.errors import UserError

BEST = 5  # candidates that are shown

MOST_DEVICES = 2  # devices' memory up to which the front is drawn

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
    front: list[Prediction] = field(default_factory=list)  # the fastest in its memory, fastest first, fitting or not
    problems: Counter[str] = field(default_factory=Counter)  # rules that candidates break, with their number

    @property
    def smallest(self) -> Prediction | None:
        """The candidate that needs least memory."""
        return self.front[-1] if self.front else None


def search(
    config: RunConfig,
    cluster: DescribedCluster,
    stack: StackConfig,
    world_size: int,
    restrictions: Restrictions,
    best: int = BEST,
    bounds: Sequence[LowerBound] = LOWER_BOUNDS,
    offloads: bool = True,
) -> SearchResult:
    """Return the fastest layouts of a model on a cluster, those that fit and those on the front of memory.

    With `offloads`, state and activations may be on the host, if the link to it is known.
    """
    result = SearchResult()
    valid: list[Candidate] = []
    offloads = offloads and cluster.device == "cuda" and cluster.hardware.host_bandwidth is not None
    space = SearchedSpace(world_size, cluster.gpus_per_node, stack, offloads, restrictions)
    state_bytes: dict[tuple[Layout, int], int] = {}
    for candidate, layout in candidates(config, space):
        result.considered += 1
        prediction = predict(candidate, layout, cluster, stack)
        key = (layout, candidate.train.micro_batch)
        if key not in state_bytes:
            state_bytes = {key: state_of(prediction, bounds)}  # candidates of one layout follow each other
        if state_bytes[key] > MOST_DEVICES * prediction.available_bytes:
            result.beyond += 1
            continue
        problem = next(plan_problems(candidate, layout, cluster, stack), None)
        if problem is None:
            valid.append((prediction, state_bytes[key]))
        else:
            result.problems[problem] += 1
    result.valid = len(valid)
    rank(valid, result, best, bounds[1:])
    return result


def state_of(prediction: Prediction, bounds: Sequence[LowerBound]) -> int:
    """Return the first lower bound; 0 without bounds, and for layouts that break a rule of the model's stages."""
    try:
        return bounds[0](prediction) if bounds else 0
    except UserError:
        return 0


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
        if not prediction.fits_host:
            continue
        if len(result.best) < best and prediction.fits:
            result.best.append(prediction)
        peak = prediction.memory.peak_bytes
        if peak < smallest and peak <= MOST_DEVICES * prediction.available_bytes:
            smallest = peak
            result.front.append(prediction)
