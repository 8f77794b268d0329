"""Runs of launch=simulated as rows: faults that their proofs or the plan notice, and times near the planner's."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from harness.config.stack import load_stack
from harness.cost_model.memory import estimate_memory
from harness.cost_model.timing.step_time import estimate_step_time
from harness.layout.layout import resolve_layout
from harness.proof.simulation import NO_REFERENCE, verify_simulation
from harness.records.rank_report import RankReport
from harness.records.store import read_all
from harness.report.sources import sources
from harness.report.view import view_of
from harness.runner.plan import make_plan
from harness.runner.resolve import machine_of_run
from harness.simulator.process import StepRequest
from tests.support.commands import Harness, compose_config, compose_layout, long, read_rows, run_harness, widths_of
from tests.support.simulated_steps import simulate_steps

TWO_LAYERS = ("model=1b", "model.num_hidden_layers=2", "precision=bf16_mixed", "data=synthetic")

OPTIONS = ("launch=simulated", "cluster=8xh100", "tracking=none", *TWO_LAYERS)

# More layers than the prefetched one, so that gathered parameters which stay would show.
FOUR_LAYERS = (*TWO_LAYERS, "launch=simulated", "model.num_hidden_layers=4", "train.global_batch=4", "world_size=4")


FSDP = "fsdp_full_shard"

MOVED = "checkpointing.offload_activations=true"

OFFLOADED = f"ddp {MOVED}"

QUANTIZED = "zero3_plus_plus strategy.secondary_shards=2 cluster.gpus_per_node=2"

V_SHAPED = "{} model.num_hidden_layers=8 train.global_batch=8 model.tie_word_embeddings=false"


def test_a_simulated_run_is_a_row_of_its_own(harness: Harness, tmp_path: Path) -> None:
    """One command simulates a layout that fits and one that does not, however long a step of theirs takes."""
    sweep = (
        "hang_seconds=0.5",
        "-m",
        "strategy=single",
        "train.micro_batch=4,16",
        "train.global_batch=16",
        "world_size=1",
    )
    result = harness(*sweep, *OPTIONS, "name=sim")
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "results" / "sim"
    loaded = read_all(folder)
    fits, full = sorted((record.row for record in loaded.records), key=lambda row: row["micro_batch"])
    assert (fits["status"], fits["launch"], fits["measured_on"]) == ("ok", "simulated", "NVIDIA H100 80GB HBM3")
    assert full["status"] == "oom" and full["failed_in_phase"] == "warm-up", full["reason"]
    assert fits["peak_requested_bytes"] <= fits["peak_allocated_bytes"] < fits["peak_reserved_bytes"]
    assert fits.get("loss_first") is fits.get("loss_deviation") is None
    proofs = [record.proof for record in loaded.records if record.status == "ok"]
    assert [(proof["layout"], proof["reference"]) for proof in proofs] == [("proven", NO_REFERENCE["simulated"])]
    (section,) = sources(view_of((folder, loaded)))
    assert len(section.parts[0].rows) == 1  # type: ignore[union-attr]


STAGES = "strategy=pp_1f1b strategy.pp=4 strategy.dp_replicate=2 strategy.data_parallel=ddp"


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ("strategy=fsdp_full_shard", 8, (0,)),
        (STAGES, 8, (0,)),
        (f"{STAGES} simulate.rank=all", 8, (0, 2, 4, 6)),
        ("strategy=ddp simulate.rank=5", 8, (5,)),
        # Where every rank has other parameters, those with the highest simulated peaks; see test_simulator.py too.
        ("strategy=zero2_tuned", 4, (3,)),
        ("strategy=zero2", 4, (3,)),  # as high as on all others
        ("strategy=zero_offload", 4, (3,)),
        ("strategy=zero3", 4, (0,)),
        ("strategy=zero2 simulate.rank=2", 4, (2,)),
    ],
)
def test_the_ranks_that_are_simulated(overrides: str, world_size: int, expected: tuple[int, ...]) -> None:
    base = ("launch=simulated", "cluster=8xh100", "model=7b", "precision=bf16_mixed", "train.global_batch=16")
    sizes = (f"world_size={world_size}", f"model.num_hidden_layers={world_size}", "data=synthetic")
    config = compose_config(*overrides.split(), *base, *sizes)
    assert make_plan(config, machine_of_run(config.to_dict())).ranks_alone == expected


def request_of(strategy: str) -> StepRequest:
    return StepRequest(*compose_layout(4, *FOUR_LAYERS, *f"strategy={strategy}".split()))


def problems_of(request: StepRequest, report: RankReport) -> list[str]:
    """Return what is wrong with rank 0: its error, what is not proven, or a peak beyond the plan's."""
    if report.status != "ok":
        return [report.reason]
    config, layout = request.config, request.layout
    widths = widths_of(config, layout)
    proof = verify_simulation(config, layout, widths, [report]).parts.get("proof", {})
    planned = estimate_memory(config, layout, widths, "cuda").peak_bytes
    peak = report.profiled.peak_allocated_bytes or 0
    return [*proof.get("problems", ()), *(["the peak is beyond the plan's"] if peak > 1.002 * planned else [])]


@pytest.mark.parametrize(
    ("fault", "strategy", "problem"),
    [
        ("tensor_on_the_host", FSDP, "cpu"),
        ("collective_on_the_wrong_group", "ddp", "along dp_replicate"),
        ("last_layer_not_offloaded", OFFLOADED, "of activations on the host, and"),
        ("offloaded_never_freed", OFFLOADED, "the peak is beyond the plan's"),
        long("last_layer_not_offloaded", f"{OFFLOADED} checkpointing=full", "of activations on the host, and"),
        long("forgotten_free", FSDP, "along dp_shard"),
        long("kept_reference", FSDP, "the peak is beyond the plan's"),
        long("gather_never_freed", "zero3", "the peak is beyond the plan's"),
        long("unquantized_gathers", QUANTIZED, "along dp_shard gather"),
        long("unexchanged_gradients", QUANTIZED, "along dp_shard reduce"),
    ],
)
def test_faults_in_the_code_for_cuda_are_noticed(fault: str, strategy: str, problem: str) -> None:
    request = request_of(strategy)
    (report,) = simulate_steps([request], module=("tests.support.simulated_faults", fault))
    problems = problems_of(request, report)
    assert any(problem in entry for entry in problems), problems


DROPPED = "ddp model=gpt_tiny model.num_hidden_layers=4 model.dropout=0.1 checkpointing=full"

RIGHT = (QUANTIZED, DROPPED, "zero2 precision=fp16_mixed", f"{FSDP} strategy.secondary_shards=2", OFFLOADED, FSDP)

FURTHER = (
    *(f"{OFFLOADED} checkpointing={name}" for name in ("full", "attention", "every_n")),
    *(f"{name} {MOVED}" for name in ("tp", "tp_sp", "cp", "cp_ulysses", "pp_1f1b")),
    *("ddp", "zero3", "zero1 precision=fp16_mixed", "zero3_hpz"),
    *map(V_SHAPED.format, ("pp_zbv", "pp_dualpipev")),
)


@functools.cache
def right_reports(strategies: tuple[str, ...]) -> dict[str, RankReport]:
    """Return the report of each strategy's rank 0, all of them simulated in one process."""
    return dict(zip(strategies, simulate_steps([*map(request_of, strategies)]), strict=True))


@pytest.mark.parametrize(
    ("strategy", "all_"), [*((each, RIGHT) for each in RIGHT), *(long(each, FURTHER) for each in FURTHER)]
)
def test_nothing_else_is_noticed(strategy: str, all_: tuple[str, ...]) -> None:
    assert problems_of(request_of(strategy), right_reports(all_)[strategy]) == []


def test_a_budget_is_what_tensors_may_take() -> None:
    """On CUDA it limits what the allocator reserves, and what the process takes besides is no part of it."""
    config_lines = ("strategy=single", *TWO_LAYERS, "train.global_batch=1")
    config, layout = compose_layout(1, *config_lines)
    free = [StepRequest(config, layout, device=device) for device in ("cuda", "cpu")]
    cuda, cpu = simulate_steps(free)
    needed = (cuda.peak_reserved_bytes or 0, cpu.peak_allocated_bytes or 0)
    limited = [
        dataclasses.replace(request, config=compose_config(*config_lines, f"cluster.memory_budget={budget}B"))
        for request, enough in zip(free, needed, strict=True)
        for budget in (enough, enough - 1)
    ]
    reports = simulate_steps(limited)
    assert [report.status for report in reports] == ["ok", "oom", "ok", "oom"], [report.reason for report in reports]
    assert reports[1].reason.endswith("that the process may reserve")


def test_a_share_that_is_not_there_is_a_problem() -> None:
    """One simulated rank shows alone that it holds its share, and nothing more."""
    config, layout = request_of(FSDP).config, request_of(FSDP).layout
    widths, report = widths_of(config, layout), right_reports(RIGHT)[FSDP]
    lost = dataclasses.replace(report, parameter_shards=report.parameter_shards[1:])
    doubled = dataclasses.replace(report, parameter_shards=[*report.parameter_shards, *report.parameter_shards])

    def reason(changed: RankReport) -> str:
        return str(verify_simulation(config, layout, widths, [changed]).columns["reason"])

    assert reason(report) == ""
    assert "parameters: rank 0 holds" in reason(lost) and "its share is" in reason(lost)
    assert "parameters: rank 0 holds" in reason(doubled) and "its equal share is" in reason(doubled)


def test_a_simulation_has_an_identity_of_its_own() -> None:
    """A run's identity does not depend on keys that only simulations read."""
    real = compose_config("strategy=ddp", *TWO_LAYERS)
    other_rank = dataclasses.replace(real, simulate=dataclasses.replace(real.simulate, rank="all"))
    plans = [make_plan(config, machine_of_run(config.to_dict())) for config in (real, other_rank)]
    assert plans[0].run_id == plans[1].run_id
    simulated = [dataclasses.replace(config, launch="simulated") for config in (real, other_rank)]
    ids = {make_plan(config, machine_of_run(config.to_dict())).run_id for config in simulated}
    assert len(ids | {plans[0].run_id}) == 3


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
        # The formula leaves out that BF16_Optimizer, stage 1's, keeps another copy of gradients and clips them whole.
        # It waits for gathers of stage 3 that begin as soon as the host launches them, though nothing is prefetched.
        assert formula[strategy] == pytest.approx(simulated[strategy], rel=0.15), strategy


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
