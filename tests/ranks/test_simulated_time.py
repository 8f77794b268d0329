"""The time of a simulated step: near the planner's, of parts that add up, and changed by faults in waits and groups."""

from pathlib import Path
from typing import Any

import pytest

from harness.config.stack import load_stack
from harness.cost_model.timing.step_time import estimate_step_time
from harness.layout.layout import resolve_layout
from harness.simulator.process import StepRequest
from tests.support.commands import compose_config, read_rows, run_harness
from tests.support.simulated_steps import simulate_steps

Times = dict[str, list[dict[str, Any]]]  # by fault, of every request, or of the first


def request(world_size: int, rank: int, *overrides: str) -> StepRequest:
    small = ("model=1b", "precision=bf16_mixed", "model.num_hidden_layers=2", "model.vocab_size=4096")
    config = compose_config("cluster=8xh100", *small, *overrides)
    return StepRequest(config, resolve_layout(config.strategy, world_size), rank)


HYBRID = request(16, 0, "strategy=fsdp_hybrid_shard", "cluster.nodes=2", "strategy.dp_shard=8", "train.global_batch=16")

PIPELINE = [
    request(2, rank, "strategy=pp_1f1b", "train.global_batch=4", "model.tie_word_embeddings=false") for rank in (0, 1)
]


@pytest.fixture(scope="module")
def times() -> Times:
    """Return the simulated times of a sharded rank on two nodes, and of both stages of a pipeline, by fault."""
    reports = {"none": simulate_steps((HYBRID, *PIPELINE))}
    for fault in ("forgotten_wait", "wrong_group"):
        reports[fault] = simulate_steps((HYBRID,), module=("tests.support.simulated_faults", fault))
    return {fault: [report.to_json()["simulated_time"] for report in own] for fault, own in reports.items()}


def planned_seconds(entry: StepRequest) -> float:
    hardware = entry.config.cluster.hardware
    assert hardware is not None
    timing = load_stack("harness").timing
    return estimate_step_time(entry.config, entry.layout, hardware, timing, None, 8).step_seconds


def test_a_simulated_step_takes_about_as_long_as_the_plan_says(times: Times) -> None:
    sharded, *stages = times["none"]
    assert sharded["step_seconds"] == pytest.approx(planned_seconds(HYBRID), rel=0.1)
    assert (
        stages[0]["step_seconds"] == stages[1]["step_seconds"] == pytest.approx(planned_seconds(PIPELINE[0]), rel=0.1)
    )


@pytest.mark.long
def test_settings_of_deepspeed_take_as_long_as_planned(tmp_path: Path) -> None:
    """The papers' settings wait for reductions and gathers that tuned ones hide, in the plan as in DeepSpeed's code."""
    strategies = ("zero1", "zero1_tuned", "zero2", "zero2_tuned", "zero3", "zero3_tuned")
    sizes = ("model=7b", "model.num_hidden_layers=4", "train.global_batch=32", "train.micro_batch=1")
    settings = (f"strategy={','.join(strategies)}", "launch=simulated", "cluster=8xh100", "checkpointing=full", *sizes)
    assert run_harness(tmp_path, "-m", *settings, "name=settings").returncode == 0
    rows = read_rows(tmp_path, "settings").set_index("strategy")
    assert list(rows["status"]) == ["ok"] * len(strategies)
    simulated, formula = rows["step_seconds"], rows["predicted_step_seconds"]
    for stage in ("zero2", "zero3"):
        assert simulated[stage] > simulated[f"{stage}_tuned"] and formula[stage] > formula[f"{stage}_tuned"]
    for strategy in strategies:
        assert formula[strategy] == pytest.approx(simulated[strategy], rel=0.12), strategy


def test_the_parts_of_a_step_add_up(times: Times) -> None:
    for time in times["none"]:
        parts = sum(time["phase_seconds"].values()) + sum(time["exposed_seconds"].values())
        assert parts + time["copy_seconds"] + time["idle_seconds"] == pytest.approx(time["step_seconds"])


def test_stages_wait_for_each_other_about_as_long_as_the_schedule_says(times: Times) -> None:
    """The slower stage of two waits for a quarter of its four passes."""
    slower = min(times["none"][1:], key=lambda time: time["bubble_seconds"])
    working = slower["step_seconds"] - slower["bubble_seconds"]
    assert slower["bubble_seconds"] == pytest.approx(working / 4, rel=0.15)
    assert not slower["bubble_is_planned"]


def test_a_forgotten_wait_hides_communication_that_is_exposed(times: Times) -> None:
    right, wrong = times["none"][0], times["forgotten_wait"][0]
    assert wrong["exposed_seconds"]["dp_shard"] < 0.8 * right["exposed_seconds"]["dp_shard"]
    assert wrong["operator_seconds"] == right["operator_seconds"]


def test_a_collective_on_the_wrong_group_takes_another_time(times: Times) -> None:
    right, wrong = times["none"][0], times["wrong_group"][0]
    gather = "forward/_allgather_base_"
    assert wrong["operator_seconds"][gather] > 1.5 * right["operator_seconds"][gather]
    assert any("+" in axes for axes in wrong["exposed_seconds"])
