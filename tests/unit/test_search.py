"""The search of layouts: it finds what brute force finds, and the memory model's shortcuts change no byte."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from harness.config.schema import PrecisionConfig, RunConfig
from harness.config.stack import load_stack
from harness.config.strategy import StrategyConfig
from harness.cost_model.memory import WORKSPACE_BYTES
from harness.cost_model.pipeline import REPEATING_ROUNDS, BackwardStart, _backward_starts
from harness.cost_model.prediction import Prediction
from harness.cost_model.timing.kernels import layer_seconds
from harness.cost_model.timing.layer_time import StepSetting, recomputed_share
from harness.layout.layout import resolve_layout
from harness.layout.partition import split_into_stages
from harness.planner.plan import search_layouts
from harness.planner.search import LOWER_BOUNDS, LowerBound, SearchResult, search
from harness.planner.space import SearchedSpace, candidates, plan_problems, predict
from tests.support.models import BF16, FP32, run, shaped
from tests.support.planned import cluster_of_eight, planned
from tests.support.rank_memory import estimate_rank_memory

MODEL = shaped(num_hidden_layers=8, hidden_size=256, intermediate_size=1024, vocab_size=1000)

LONG = dataclasses.replace(MODEL, context_length=2048, vocab_size=4000)


def space(
    config: RunConfig, *fixed: str, memory: str = "80GB", stack: str = "harness", **strategy: Any
) -> SearchedSpace:
    """Return what is searched on eight devices; these settings, and those of the strategy, are fixed."""
    config = dataclasses.replace(config, strategy=StrategyConfig("single", **strategy))
    keys = (*fixed, *(f"strategy.{key}" for key in strategy))
    return SearchedSpace(config, cluster_of_eight(memory=memory), load_stack(stack), 8, keys)


def searched(memory: str, bounds: Sequence[LowerBound] = LOWER_BOUNDS, stack: str = "harness") -> SearchResult:
    """Return the result of a search of one checkpointing, whose candidates brute force goes through in a moment."""
    config = run(MODEL, checkpointing="full", global_batch=16)
    return search(space(config, "checkpointing", memory=memory, stack=stack), bounds=bounds)


def figures(predictions: list[Prediction]) -> list[tuple[float, int]]:
    """Return step time and peak of each prediction."""
    return [(prediction.step_seconds, prediction.memory.peak_bytes) for prediction in predictions]


def agree(pruned: SearchResult, exhaustive: SearchResult) -> bool:
    """Return whether two searches have the same best candidates and the same front."""
    assert exhaustive.front and exhaustive.memory_estimates == exhaustive.valid
    return all(figures(getattr(pruned, name)) == figures(getattr(exhaustive, name)) for name in ("best", "front"))


@pytest.mark.parametrize("memory", ("1940MB", "3300MB"))
@pytest.mark.parametrize("stack", ("harness", "megatron", "nanotron", "llm_foundry"))
def test_pruning_skips_nothing_that_wins(memory: str, stack: str) -> None:
    pruned, exhaustive = searched(memory, stack=stack), searched(memory, (), stack)
    assert agree(pruned, exhaustive)
    assert pruned.memory_estimates < exhaustive.memory_estimates or stack == "llm_foundry"  # it has six layouts
    assert exhaustive.best or stack != "harness"


# What is searched, and what shows in a layout that its axis was.
AXES_OF_SEARCH: dict[str, tuple[str, dict[str, Any], Callable[[Prediction], bool]]] = {
    "cp": ("none", {"tp": 1, "pp": 1}, lambda prediction: prediction.layout.cp == 2),
    "ulysses": (
        "none",
        {"tp": 1, "pp": 1, "context_parallel": "ulysses"},
        lambda prediction: prediction.layout.exchanges_heads,
    ),
    "two stages in a V": (
        "full",
        {"tp": 2, "cp": 1, "pp": 4, "schedule": "zbv"},
        lambda prediction: prediction.layout.is_v_shaped,
    ),
    "offload of state": ("full", {"tp": 1, "cp": 1}, lambda prediction: prediction.layout.offload != "none"),
    "kinds of checkpointing": (
        "",
        {"tp": 2, "cp": 1, "schedule": "1f1b"},
        lambda prediction: prediction.config.checkpointing.offload_activations,
    ),
}


@pytest.mark.parametrize("precision", (FP32, BF16), ids=lambda precision: precision.name)
@pytest.mark.parametrize("axis", AXES_OF_SEARCH)
def test_pruning_holds_along_every_axis(axis: str, precision: PrecisionConfig) -> None:
    kind, strategy, shows = AXES_OF_SEARCH[axis]
    config = run(LONG, precision, kind or "none", global_batch=8, seq_len=2048)
    fixed = ("train.micro_batch", "checkpointing")[: 2 if kind else 1]
    of_axis = space(config, *fixed, memory="1500MB", **strategy)
    pruned, exhaustive = (search(of_axis, 3, bounds) for bounds in (LOWER_BOUNDS, ()))
    assert agree(pruned, exhaustive)
    assert any(map(shows, [*exhaustive.front, *exhaustive.best]))


def test_the_space_has_every_axis() -> None:
    """ZeRO-1 in pipelines is expressed by other stacks, and by this project's engines without master weights."""

    def choices(stack: str, precision: PrecisionConfig, offloads: bool = True) -> set[object]:
        config = run(LONG, precision, global_batch=8, seq_len=4096)
        names: set[object] = set()
        whole = dataclasses.replace(space(config, "train.micro_batch", stack=stack), wants_host=offloads)
        for candidate, layout in candidates(whole):
            checkpointing = candidate.checkpointing
            names |= {f"cp {layout.cp}", f"{layout.offload} {layout.engine}", layout.context_parallel}
            names.add(f"{layout.schedule} {layout.virtual_stages}")
            names.add((layout.data_parallel, layout.zero_stage, layout.pp > 1))
            names.add(f"{checkpointing.name} {checkpointing.every} {checkpointing.offload_activations}")
        return names

    own = choices("harness", FP32)
    assert {"cp 1", "cp 2", "cp 4", "optimizer deepspeed", "parameters torch", "parameters deepspeed"} <= own
    assert {"every_n 2 False", "none 1 True", "full 1 True", ("ddp", 1, True)} <= own and "cp 8" not in own
    assert {"ulysses", "zbv 2", "dualpipev 2", "zero_bubble 1", "zero_bubble 2", "interleaved_1f1b 4"} <= own
    assert ("ddp", 1, True) not in choices("harness", BF16)
    assert not {"optimizer deepspeed", "none 1 True"} & choices("harness", BF16, offloads=False)
    megatron = choices("megatron", BF16)
    assert {("ddp", 1, True), ("ddp", 0, True)} <= megatron and "interleaved_1f1b 2" in megatron
    assert not {"zero_bubble 1", "zbv 2", "dualpipev 2", "ulysses"} & megatron
    assert not any(entry[0] == "fsdp" for entry in megatron if isinstance(entry, tuple))


def test_secondary_shards_are_searched_within_the_nodes_of_shards_of_several() -> None:
    """All that a run would take, and no others."""

    def secondary(nodes: int, **strategy: Any) -> set[tuple[str, int, int]]:
        config = run(LONG, checkpointing="full", global_batch=32)
        of_nodes = space(config, "train.micro_batch", "checkpointing", **strategy)
        wide = dataclasses.replace(of_nodes, cluster=cluster_of_eight(nodes), world_size=8 * nodes)
        chosen = [(config, layout) for config, layout in candidates(wide) if layout.secondary_shards > 1]
        assert not [problem for pair in chosen for problem in plan_problems(predict(*pair, wide.cluster, wide.stack))]
        return {(layout.engine, layout.dp_shard, layout.secondary_shards) for _, layout in chosen}

    assert secondary(1) == set()
    assert secondary(4) == {("torch", 32, 8), ("deepspeed", 32, 8)}
    assert secondary(2, secondary_shards=4) == {("torch", 16, 4), ("torch", 8, 4), ("deepspeed", 16, 4)}


def test_no_schedule_halves_a_backward_that_ddp_or_stage_3_reads() -> None:
    """They would be half of a search's candidates, and a run refuses each."""
    result = search(space(run(MODEL, checkpointing="none", global_batch=16), "checkpointing", cp=1))
    assert result.valid and not [line for line in result.problems if "still needs" in line or "before strategy" in line]


def test_a_backward_in_halves_runs_a_second_forward_for_each() -> None:
    """The fault was one second forward, as of whole backwards, so that zero bubble won under full checkpointing."""

    def recomputed(schedule: str) -> float:
        strategy = StrategyConfig("pipeline", pp=4, schedule=schedule, virtual_stages=2)  # type: ignore[arg-type]
        config = dataclasses.replace(run(MODEL, checkpointing="full", global_batch=16), strategy=strategy)
        plan = predict(config, resolve_layout(strategy, 4), cluster_of_eight(), load_stack("harness"))
        step = StepSetting(config, plan.layout, plan.cluster.hardware, plan.stack.timing, plan.widths, 8)
        return recomputed_share(step, layer_seconds(step.shape, step.hardware, step.timing))

    whole = recomputed("interleaved_1f1b")
    assert recomputed("zbv") == recomputed("zero_bubble") == pytest.approx(2 * whole)
    assert recomputed("dualpipev") == pytest.approx((1 + 6 / 32) * whole)  # rank 1 of 4 halves 6 of 2 x 16 passes


def test_what_the_command_line_sets_stays() -> None:
    fixed = space(run(LONG, global_batch=8), "checkpointing.offload_activations", offload="none", cp=2)
    found = list(candidates(fixed))
    assert {(layout.cp, layout.offload) for _, layout in found} == {(2, "none")}
    kinds = {candidate.checkpointing for candidate, _ in found}
    assert len(kinds) == 5 and not any(kind.offload_activations for kind in kinds)


@pytest.mark.parametrize("position", (0, 1))
def test_a_bound_that_is_too_high_loses_winners(position: int) -> None:
    bounds = list(LOWER_BOUNDS)
    bounds[position] = lambda prediction: 8 * LOWER_BOUNDS[position](prediction)
    assert figures(searched("2GB", bounds).front) != figures(searched("2GB").front)


@pytest.mark.parametrize("stack", ("harness", "megatron", "modalities"))
def test_the_bounds_are_below_every_peak(stack: str) -> None:
    pairs = space(run(MODEL, global_batch=16, micro_batch=2), "train.micro_batch", stack=stack)
    every = (predict(*pair, pairs.cluster, pairs.stack) for pair in itertools.islice(candidates(pairs), 0, None, 7))
    valid = [prediction for prediction in every if not any(plan_problems(prediction))]
    assert len(valid) > 20 or stack == "modalities"
    too_high = (each for each in valid if max(bound(each) for bound in LOWER_BOUNDS) > each.memory.peak_bytes)
    assert [prediction.label() for prediction in too_high] == []


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("interleaved_1f1b", 3), ("zero_bubble", 2), ("1f1b", 1), ("zbv", 2), ("dualpipev", 2)]
)
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
        {"pp": 2, "schedule": "zero_bubble", "virtual_stages": 2},
        {"pp": 4, "schedule": "zbv", "virtual_stages": 2},
        {"pp": 4, "schedule": "dualpipev", "virtual_stages": 2},
    ],
    ids=str,
)
def test_shortcuts_change_no_byte(checkpointing: str, pipeline: dict[str, object]) -> None:
    """The estimate is that of the highest rank, of which every start is played with its own stages."""
    if checkpointing == "selective" and pipeline.get("schedule") in ("zero_bubble", "zbv", "dualpipev"):
        pytest.skip("backwards in halves have no selective checkpointing")
    strategy = StrategyConfig(name="pipeline", **pipeline)  # type: ignore[arg-type]
    config = dataclasses.replace(run(MODEL, checkpointing=checkpointing, global_batch=24), strategy=strategy)
    layout = resolve_layout(strategy, strategy.pp)
    prediction = predict(config, layout, cluster_of_eight(), load_stack("harness"))
    stages = split_into_stages(config.model, prediction.layout)
    ranks = [
        estimate_rank_memory(
            config, layout, prediction.widths, "cuda", rank, [stages[index] for index in layout.stage_indices(rank)]
        )
        for rank in range(strategy.pp)
    ]
    highest = max(ranks, key=lambda rank: rank.peak_bytes)
    at_peak = highest.at_peak | {"workspaces": WORKSPACE_BYTES}
    assert prediction.memory == dataclasses.replace(highest, at_peak=at_peak)


def test_offload_is_searched_on_request_or_where_nothing_fits_without() -> None:
    """A link's datasheet is all that is known of copies to the host: what they promise shall not win unasked."""

    def offloaded(memory: str, **strategy: str) -> bool:
        config, fixed = run(LONG, BF16, "full", global_batch=8), ("checkpointing", "train.micro_batch")
        result, _ = search_layouts(space(config, *fixed, memory=memory, tp=1, cp=1, pp=1, **strategy))
        shown = [*result.best, *result.front]
        return any(p.layout.offload != "none" or p.config.checkpointing.offload_activations for p in shown)

    assert not offloaded("2GB")
    assert offloaded("2GB", offload="optimizer")
    assert offloaded("590MB")


def test_a_further_axis_that_gains_nothing_is_not_among_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 4,000 tokens layouts of 64 A100 with context parallelism are within one percent of the one without."""
    words = ("model=70b", "cluster=8xa100_80", "cluster.nodes=8", "train.seq_len=4096", "train.global_batch=512")
    fixed = ("strategy=search", "strategy.tp=2", "strategy.pp=1", "strategy.zero_stage=3", "checkpointing=selective")

    def ties() -> list[frozenset[str]]:
        result = planned(*words, *fixed, "precision=bf16_mixed").result
        assert result is not None
        fastest, *others = result.best
        return [
            other.layout.model_axes
            for other in others
            if other.step_seconds < 1.03 * fastest.step_seconds and other.layout.model_axes > fastest.layout.model_axes
        ]

    assert ties() == []
    monkeypatch.setattr("harness.planner.search.gains_nothing", lambda *_: False)
    assert {"tp", "cp"} in ties()


@pytest.mark.parametrize(("heads", "fixed", "degree"), [(8, (), 0), (4, (), 8), (2, (), 4), (2, ("strategy.tp",), 0)])
def test_a_search_says_which_tensor_parallelism_a_run_refuses(heads: int, fixed: tuple[str, ...], degree: int) -> None:
    """The fault was silence: degrees that do not divide the heads were left out without a word."""
    model = dataclasses.replace(MODEL, num_attention_heads=8, num_key_value_heads=heads)
    _, notes = search_layouts(space(run(model, checkpointing="full", global_batch=16), "checkpointing", *fixed))
    rule = f"strategy.tp={degree} does not divide model.num_key_value_heads={heads}"
    assert [rule in note for note in notes] == [True] * bool(degree)
