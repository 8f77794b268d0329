"""The search for the fastest layouts that fit, with a lower bound on memory that skips what cannot win. No torch.

Candidates are taken from the fastest on. Each that needs less memory than all before it is on the front of memory
against speed. Once enough of them fit, only a candidate that could still be on the front is worth an exact estimate of
its memory, and its lower bound says whether it could.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from harness.config.schema import RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.cost_model.optimizer_memory import optimizer_parameter_count
from harness.cost_model.rank_memory import alike_ranks
from harness.cost_model.stage_activations import stage_activations
from harness.cost_model.stage_memory import local_parameter_count
from harness.layout.parameters import parameter_count
from harness.planner.cluster import PlannedCluster, plan_problems
from harness.planner.predict import Prediction
from harness.planner.space import Restrictions, candidates

BEST = 5  # candidates that are shown

MOST_DEVICES = 2  # devices' memory up to which the front is drawn

LowerBound = Callable[[Prediction], int]


@dataclass
class SearchResult:
    """The best candidates of a search, and how it came to them."""

    considered: int = 0  # candidates before the rules of a run
    valid: int = 0  # of them, those that could run
    beyond: int = 0  # of them, those whose state alone exceeds MOST_DEVICES devices' memory
    memory_estimates: int = 0  # exact ones; the lower bound spared all others
    best: list[Prediction] = field(default_factory=list)  # the fastest that fit, fastest first
    front: list[Prediction] = field(default_factory=list)  # the fastest in its memory, fastest first, fitting or not
    problems: dict[str, int] = field(default_factory=dict)  # rules that candidates break, with their number

    @property
    def fastest_misfit(self) -> Prediction | None:
        """The fastest candidate that does not fit, if it is faster than all that do."""
        first = self.front[0] if self.front else None
        return first if first is not None and not first.fits else None

    @property
    def smallest(self) -> Prediction | None:
        """The candidate that needs least memory."""
        return self.front[-1] if self.front else None


def memory_lower_bound(prediction: Prediction) -> int:
    """Return bytes that the peak of the highest rank is at least, at the optimizer's step or when a backward starts.

    The fullest rank has at least the mean of all ranks' parameters, and holds them with gradients and optimizer state
    when the optimizer steps. The first rank of a pipeline keeps the activations of all passes in flight, beside its
    parameters and optimizer state. Stacks of other implementations are bounded by 0.
    """
    layout = prediction.layout
    if prediction.stack.memory.kind != "harness" or layout.offload != "none":
        return 0
    widths, parts = prediction.widths, layout.tp * layout.pp
    per_parameter = (
        widths.parameters / layout.shard_count("parameters")
        + widths.gradients / layout.shard_count("gradients")
        + widths.optimizer / layout.shard_count("optimizer")
    )
    state = int(per_parameter * _parameters(prediction.config) / parts * (1 - 1e-12))
    return max(state, _first_rank_lower_bound(prediction))


def _first_rank_lower_bound(prediction: Prediction) -> int:
    """Return bytes of the pipeline's first rank at the start of a backward: of its state, and kept by its first stage.

    Passes through its other stages, of which a schedule may have fewer in flight, are left out.
    """
    config, layout, widths = prediction.config, prediction.layout, prediction.widths
    stages, _ = alike_ranks(config.model, layout, config.checkpointing.every)[0]
    count = sum(local_parameter_count(config.model, stage, layout.tp, layout.vocabulary_tp) for stage in stages)
    even_count = optimizer_parameter_count(config.model, layout, stages)
    resident = widths.parameters * count // layout.shard_count("parameters") + widths.optimizer * even_count
    shape = micro_batch_shape(config, layout, prediction.cluster.device)
    saved = stage_activations(shape, stages[0], config.checkpointing).before_backward
    micro_batches = layout.grad_accumulation_steps(config.train)
    in_flight = {"gpipe": micro_batches, "1f1b": min(micro_batches, layout.pp)}
    passes = in_flight.get(layout.schedule, 1) if layout.pp_enabled else 1
    return int(resident + passes * saved)


def _parameters(config: RunConfig) -> int:
    key = id(config.model)
    if key not in _COUNTS:
        _COUNTS.clear()
        _COUNTS[key] = (config.model, parameter_count(config.model))
    return _COUNTS[key][1]


_COUNTS: dict[int, tuple[object, int]] = {}  # of the model that is searched at the moment; it keeps its id alive


def search(
    config: RunConfig,
    cluster: PlannedCluster,
    stack: StackConfig,
    world_size: int,
    restrictions: Restrictions,
    best: int = BEST,
    lower_bound: LowerBound = memory_lower_bound,
) -> SearchResult:
    """Return the fastest layouts of a model on a cluster, those that fit and those on the front of memory."""
    result = SearchResult()
    valid = []
    for candidate, layout in candidates(config, world_size, cluster.gpus_per_node, restrictions):
        result.considered += 1
        problem = next(plan_problems(candidate, layout, cluster, stack), None)
        if problem is None:
            valid.append(Prediction(candidate, layout, cluster, stack))
        else:
            result.problems[problem] = result.problems.get(problem, 0) + 1
    result.valid = len(valid)
    rank(valid, result, best, lower_bound)
    return result


def rank(predictions: Iterable[Prediction], result: SearchResult, best: int, lower_bound: LowerBound) -> None:
    """Fill in the best candidates and the front, from the fastest on."""
    smallest: int | None = None
    for prediction in sorted(predictions, key=lambda candidate: candidate.step_seconds):
        at_least = lower_bound(prediction)
        is_worse = smallest is not None and at_least >= smallest
        cannot_fit = at_least > prediction.available_bytes
        if at_least > MOST_DEVICES * prediction.available_bytes:
            result.beyond += 1
            continue
        if is_worse and (len(result.best) >= best or cannot_fit):
            continue
        result.memory_estimates += 1
        if len(result.best) < best and prediction.fits:
            result.best.append(prediction)
        if prediction.memory.peak_bytes > MOST_DEVICES * prediction.available_bytes:
            continue
        if smallest is None or prediction.memory.peak_bytes < smallest:
            smallest = prediction.memory.peak_bytes
            result.front.append(prediction)
