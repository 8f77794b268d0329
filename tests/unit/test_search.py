"""The search of layouts: it finds what brute force finds, and the memory model's shortcuts change no byte."""

import dataclasses
import itertools
import math
from dataclasses import replace

import pytest

from harness.config.checkpointing import CheckpointingConfig
from harness.config.hardware import FittedHardware, HardwareConfig
from harness.config.stack import load_stack
from harness.cost_model import rank_memory, stage_activations
from harness.cost_model.memory import estimate_memory
from harness.cost_model.pipeline import REPEATING_ROUNDS, BackwardStart, _backward_starts
from harness.layout.partition import balanced_layers
from harness.planner.cluster import PlannedCluster
from harness.planner.predict import Prediction
from harness.planner.search import SearchResult, memory_lower_bound, search
from harness.planner.space import Restrictions
from tests.support.models import run, shaped

FITTED = FittedHardware(0.8, 0.6, 2.5, 0.8, 3e-6, 5e-6, 0.8, 2e-6, 0.8, 1e-5, 0.1, 0.1)

HARDWARE = HardwareConfig(
    device_name="NVIDIA H100 80GB HBM3",
    memory="80GB",
    memory_bandwidth=3.35e12,
    intra_node_bandwidth=450e9,
    inter_node_bandwidth=50e9,
    sources=("a test",),
    fitted=FITTED,
    fitted_to="a test",
)

MODEL = shaped(num_hidden_layers=8, hidden_size=256, intermediate_size=1024, vocab_size=1000)

CONFIG = run(MODEL, global_batch=16)


ONE_KIND = Restrictions({}, CheckpointingConfig("full"))  # fewer candidates, which brute force goes through in a moment


def cluster(memory: str) -> PlannedCluster:
    """Return a node of eight devices of this memory."""
    return PlannedCluster("eight", 1, 8, replace(HARDWARE, memory=memory), "cuda")


def found_by(memory: str, lower_bound: object = memory_lower_bound) -> SearchResult:
    """Return the result of a search on eight devices of so much memory."""
    return search(CONFIG, cluster(memory), load_stack("harness"), 8, ONE_KIND, 5, lower_bound)  # type: ignore[arg-type]


def figures(predictions: list[Prediction]) -> list[tuple[float, int]]:
    """Return step time and peak of each prediction."""
    return [(prediction.step_seconds, prediction.memory.peak_bytes) for prediction in predictions]


@pytest.mark.parametrize("memory", ("640MB", "2GB"))
def test_pruning_skips_nothing_that_wins(memory: str) -> None:
    pruned, exhaustive = found_by(memory), found_by(memory, lambda prediction: 0)
    assert exhaustive.best and exhaustive.front
    assert figures(pruned.best) == figures(exhaustive.best)
    assert figures(pruned.front) == figures(exhaustive.front)
    assert pruned.memory_estimates < exhaustive.memory_estimates == pruned.valid


def test_a_bound_that_is_too_high_loses_winners() -> None:
    def too_high(prediction: Prediction) -> int:
        """Return eight times the bound."""
        return 8 * memory_lower_bound(prediction)

    assert figures(found_by("2GB", too_high).front) != figures(found_by("2GB").front)


def test_the_bound_is_below_every_peak() -> None:
    result = found_by("2GB", lambda prediction: 0)
    for prediction in (*result.best, *result.front):
        assert memory_lower_bound(prediction) <= prediction.memory.peak_bytes


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved_1f1b", 3), ("zero_bubble", 2), ("1f1b", 1)])
@pytest.mark.parametrize("pp", (2, 4))
def test_starts_of_many_micro_batches_are_those_of_few(schedule: str, virtual: int, pp: int) -> None:
    for pp_rank, rounds in itertools.product(range(pp), (REPEATING_ROUNDS + 1, REPEATING_ROUNDS + 4)):
        derived = _backward_starts(schedule, pp, virtual, rounds * pp, pp_rank)  # type: ignore[arg-type]
        assert derived == simulated_starts(schedule, pp, virtual, rounds * pp, pp_rank)


def simulated_starts(schedule: str, pp: int, virtual: int, micro_batches: int, rank: int) -> tuple[BackwardStart, ...]:
    """Return the starts by going through every pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.cost_model.pipeline.REPEATING_ROUNDS", math.inf)
        return _backward_starts.__wrapped__(schedule, pp, virtual, micro_batches, rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", ("none", "selective", "full", "attention"))
@pytest.mark.parametrize(
    "pipeline",
    [
        {"pp": 4},
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
        {"pp": 4, "schedule": "zero_bubble"},
    ],
    ids=str,
)
def test_shortcuts_change_no_byte(
    checkpointing: str, pipeline: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start of every rank with its own stages, and every moment of a layer's backward, give the same estimate."""
    if checkpointing == "selective" and pipeline.get("schedule") == "zero_bubble":
        pytest.skip("zero bubble has no selective checkpointing")
    config = run(MODEL, checkpointing=checkpointing, global_batch=24)
    prediction = pipelined(config, pipeline)
    short = estimate_memory(config, prediction.layout, prediction.widths, "cuda")
    monkeypatch.setattr(rank_memory.RankCost, "heaviest_starts", every_start)
    monkeypatch.setattr(rank_memory, "representative_stage", lambda stage, period: stage)
    monkeypatch.setattr(stage_activations, "possible_peaks", tuple)
    for cached in (rank_memory._alike_ranks, stage_activations._one_layer_activations):
        cached.cache_clear()
    stage_activations.stage_activations.cache_clear()
    try:
        assert estimate_memory(config, prediction.layout, prediction.widths, "cuda") == short
    finally:
        monkeypatch.undo()
        for cached in (rank_memory._alike_ranks, stage_activations._one_layer_activations):
            cached.cache_clear()
        stage_activations.stage_activations.cache_clear()


def every_start(cost: rank_memory.RankCost, pp_ranks: tuple[int, ...]) -> dict[int, list[BackwardStart]]:
    """Return all starts of these ranks."""
    return {rank: rank_memory.rank_backward_starts(cost.config, cost.layout, rank) for rank in pp_ranks}


def pipelined(config: object, pipeline: dict[str, object]) -> Prediction:
    """Return a prediction of this configuration as a pipeline."""
    from harness.config.strategy import StrategyConfig
    from harness.layout.layout import resolve_layout

    strategy = StrategyConfig(name="pipeline", **pipeline)  # type: ignore[arg-type]
    changed = dataclasses.replace(config, strategy=strategy)  # type: ignore[type-var]
    return Prediction(changed, resolve_layout(strategy, strategy.pp), cluster("80GB"), load_stack("harness"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (2.3, 2.3), (0.4, 3.7), (6.0, 0.1)])
def test_layers_are_balanced_as_well_as_any_split_is(first: float, last: float) -> None:
    for depth, count in ((5, 2), (7, 3), (9, 4), (6, 6)):
        splits = (split for split in itertools.product(range(1, depth + 1), repeat=count) if sum(split) == depth)

        def largest(split: tuple[int, ...]) -> float:
            """Return the size of the largest stage."""
            extras = [first, *[0.0] * (len(split) - 2), last]
            return max(number + extra for number, extra in zip(split, extras, strict=True))

        assert largest(balanced_layers(depth, first, last, count)) == min(map(largest, splits))
