"""The overrides that a search gives for its layouts: as those of a run they plan, and are, the same layout."""

import shlex

import pytest

from harness.cost_model.prediction import Prediction
from harness.planner.plan import LayoutPlan, plans
from harness.planner.row import planned_row
from harness.planner.run_overrides import preset_of, run_command, run_overrides, strategy_presets
from harness.planner.search import SearchResult

SEARCHES = (
    "model=7b cluster=8xh100 precision=bf16_mixed train.seq_len=4096 train.global_batch=128",
    "model=13b cluster=8xa100_40 cluster.nodes=2 train.global_batch=32 strategy.pp=4 checkpointing=every_n",
    "model=3b cluster=8xl40s precision=fp32 train.global_batch=16 strategy.tp=1 strategy.offload=optimizer",
    "model=7b cluster=8xrtx4090 train.global_batch=8 checkpointing.offload_activations=true train.micro_batch=1",
)


def searched(words: list[str]) -> SearchResult:
    """Return the result of a search by these overrides."""
    (plan,) = plans(words)
    assert isinstance(plan, LayoutPlan) and plan.result is not None
    return plan.result


def planned(words: list[str]) -> Prediction:
    """Return the prediction for the one layout of these overrides."""
    (plan,) = plans(words)
    assert isinstance(plan, LayoutPlan)
    (prediction,) = plan.predictions
    return prediction


@pytest.mark.parametrize("settings", SEARCHES)
def test_the_command_of_a_layout_plans_what_the_search_found(settings: str) -> None:
    words = settings.split()
    result = searched(words)
    shown = [*result.best, *result.front[::4]]
    assert shown
    for entry in shown:
        command = shlex.split(run_command(words, entry.config))
        assert command[0] == "harness"
        same = planned(command[1:])
        assert same.layout == entry.layout and same.config.checkpointing == entry.config.checkpointing
        assert same.step_seconds == entry.step_seconds and same.sent_bytes == entry.sent_bytes
        assert same.memory == entry.memory
        row, again = planned_row(entry), planned_row(same)
        assert row == again  # the strategy's name and the overrides, too
        assert row["strategy"] == preset_of(shlex.split(str(row["overrides"]))) == same.config.strategy.name


def test_a_preset_needs_no_override_of_its_own_layout() -> None:
    """Each preset's own strategy is written as its name alone, or as that of a preset with the same values."""
    for preset in strategy_presets():
        if any(isinstance(value, str) and value.startswith("${") for value in preset.values()):
            continue  # it depends on the machine
        if preset["name"] == "tp_pp":
            continue  # it has four ranks, whatever the world
        precision = "fp32" if preset["name"] in ("zero1_torch", "dp") else "bf16_mixed"
        settings = [
            "model=7b",
            "cluster=8xh100",
            f"precision={precision}",
            "train.global_batch=64",
            "train.micro_batch=8",
        ]
        words = run_overrides(planned([*settings, f"strategy={preset['name']}"]).config)
        assert [word for word in words if word.startswith("strategy.")] == [], preset["name"]


def test_other_stacks_have_no_command() -> None:
    result = searched(["model=7b", "cluster=8xh100", "stack=megatron", "train.global_batch=16", "checkpointing=full"])
    row = planned_row(result.best[0])
    assert row["strategy"] == "search" and "overrides" not in row
