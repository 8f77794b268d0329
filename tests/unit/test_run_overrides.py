"""The overrides that a search gives for its layouts: as those of a run they plan, and are, the same layout."""

import shlex

import pytest

from harness.planner.row import planned_row, run_command, run_overrides, strategy_presets
from tests.support.planned import planned

SEARCHES = (
    "model=7b cluster=8xh100 precision=bf16_mixed train.seq_len=4096 train.global_batch=128",
    "model=13b cluster=8xa100_40 cluster.nodes=2 train.global_batch=32 strategy.pp=4 checkpointing=every_n",
    "model=3b cluster=8xl40s precision=fp32 train.global_batch=16 strategy.tp=1 strategy.offload=optimizer",
    "model=7b cluster=8xrtx4090 train.global_batch=8 checkpointing.offload_activations=true train.micro_batch=1",
)


@pytest.mark.parametrize("settings", SEARCHES)
def test_the_command_of_a_layout_plans_what_the_search_found(settings: str) -> None:
    words = settings.split()
    result = planned(*words).result
    assert result is not None and result.front
    for entry in [*result.best, *result.front[::4]]:
        command = shlex.split(run_command(words, entry.config))
        assert command[0] == "harness"
        (same,) = planned(*command[1:]).predictions
        assert (same.layout, same.config.checkpointing) == (entry.layout, entry.config.checkpointing)
        figures = (entry.step_seconds, entry.sent_bytes, entry.memory)
        assert (same.step_seconds, same.sent_bytes, same.memory) == figures
        row, again = planned_row(entry), planned_row(same)
        assert row == again  # the strategy's name and the overrides, too
        assert row["strategy"] == same.config.strategy.name and f"strategy={row['strategy']}" in command


def test_a_preset_needs_no_override_of_its_own_layout() -> None:
    """Each preset's own strategy is written as its name alone, or as that of a preset with the same values."""
    for preset in strategy_presets():
        depends_on_the_machine = any(str(value).startswith("${") for value in preset.values())
        if depends_on_the_machine or preset["name"] == "tp_pp":  # which has four ranks, whatever the world
            continue
        precision = "fp32" if preset["name"] in ("zero1_torch", "dp") else "bf16_mixed"
        words = ("model=7b", "cluster=8xh100", "train.global_batch=64", "train.micro_batch=8", f"precision={precision}")
        (prediction,) = planned(*words, f"strategy={preset['name']}").predictions
        assert [word for word in run_overrides(prediction.config) if word.startswith("strategy.")] == [], preset["name"]


def test_other_stacks_have_no_command() -> None:
    words = ("model=7b", "cluster=8xh100", "stack=megatron", "train.global_batch=16", "checkpointing=full")
    result = planned(*words).result
    assert result is not None
    row = planned_row(result.best[0])
    assert row["strategy"] == "search" and "overrides" not in row
