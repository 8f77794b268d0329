"""The choice of a run's reference: its layouts in order, its chain, its predicted duration, and its one report."""

import dataclasses

import pytest

from harness.cost_model.flops import executed_flops
from harness.cost_model.memory import estimate_memory
from harness.hardware.machine import Machine
from harness.proof.reference import merge_reports
from harness.records.rank_report import RankReport, TensorFingerprint
from harness.runner.launch_run import RunContext
from harness.runner.plan import RunPlan, make_plan
from harness.runner.reference_cost import ASSUMED_MFU, TRAININGS, predict_cost
from harness.runner.reference_layouts import (
    is_single_process,
    layout_text,
    plan_reference,
    reference_configs,
    single_process,
)
from harness.runner.reference_runs import first_layers, get_reference, shallower_runs
from harness.runner.resolve import with_layers
from tests.support.commands import compose

CPU = Machine("cpu", "cpu", 1, 2, devices=0, free_bytes=(2**45,), cores=2)

H100 = Machine(
    *("cuda", "NVIDIA H100 80GB HBM3", 1, 8), devices=8, free_bytes=(2**40,) * 8, cores=64, device_bytes=2**40
)


def plan_on(machine: Machine, *overrides: str) -> RunPlan:
    config, command = compose("data=synthetic", "train.seq_len=64", *overrides)
    return make_plan(config, machine, command)


def layouts(machine: Machine, *overrides: str) -> list[str]:
    return [layout_text(config) for config in reference_configs(plan_on(machine, *overrides))]


FULL = "with checkpointing=full"


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [
        (CPU, "strategy=tp", ["a single process", f"a single process {FULL}", f"fsdp_full_shard on 2 ranks {FULL}"]),
        (
            H100,
            "strategy=zero3 world_size=4 model=350m",
            [
                "a single process",
                f"a single process {FULL}",
                f"fsdp_full_shard on 4 ranks {FULL}",
                f"fsdp_full_shard on 4 ranks with strategy.offload=parameters {FULL}",
            ],
        ),
        (  # its own layout and engine come last, and DeepSpeed's before them
            H100,
            "strategy=fsdp_full_shard world_size=4 model=350m",
            [
                "a single process",
                f"a single process {FULL}",
                f"zero3 on 4 ranks {FULL}",
                f"fsdp_full_shard on 4 ranks {FULL}",
                f"fsdp_full_shard on 4 ranks with strategy.offload=parameters {FULL}",
            ],
        ),
        (
            CPU,
            "strategy=single checkpointing=full",
            ["a single process", f"fsdp_full_shard on 2 ranks {FULL}", f"a single process {FULL}"],
        ),
        (  # sweep.parallel gave it one device of eight
            dataclasses.replace(H100, devices=1),
            "strategy=single model=350m",
            [
                "a single process",
                f"fsdp_full_shard on 1 rank with strategy.offload=parameters {FULL}",
                f"a single process {FULL}",
            ],
        ),
        (  # fewer sequences than ranks: as many ranks as can share them
            H100,
            "strategy=tp world_size=8 model=gpt_tiny model.num_attention_heads=8 model.num_key_value_heads=8"
            " train.global_batch=4 train.micro_batch=4",
            [
                "a single process",
                f"a single process {FULL}",
                f"fsdp_full_shard on 4 ranks {FULL}",
                f"fsdp_full_shard on 4 ranks with strategy.offload=parameters {FULL}",
            ],
        ),
    ],
)
def test_layouts_are_tried_in_order(machine: Machine, overrides: str, expected: list[str]) -> None:
    assert layouts(machine, *overrides.split()) == expected


def test_a_reference_is_under_the_runs_budget_and_without_its_speed_options() -> None:
    plan = plan_on(CPU, "strategy=ddp", "cluster.memory_budget=1GiB", "train.loss_chunks=2", "repeat=3")
    root, full, sharded = (plan_reference(config, plan) for config in reference_configs(plan))
    assert {p.config.cluster.memory_budget for p in (root, full, sharded)} == {"1GiB"}
    assert [p.config.train.loss_chunks for p in (root, full, sharded)] == [1, 2, 2]  # which only saves memory
    assert [p.config.repeat for p in (root, full, sharded)] == [0, 0, 0]
    assert [is_single_process(p) for p in (root, full, sharded)] == [True, False, False]
    assert all(p.folder.is_reference for p in (root, full, sharded))


def test_the_chain_goes_back_to_the_most_layers_that_fit_a_single_process() -> None:
    free = plan_on(CPU, "strategy=tp", "model.num_hidden_layers=8")
    single = plan_reference(single_process(with_layers(free.config, 5)), free)
    budget = estimate_memory(single.config, single.layout, single.widths, "cpu").peak_bytes
    plan = plan_on(CPU, "strategy=tp", "model.num_hidden_layers=8", f"cluster.memory_budget={budget}")
    sharded = plan_reference(list(reference_configs(plan))[-1], plan)
    assert first_layers(sharded, 120.0, NOTHING) == 5
    smaller = plan_on(CPU, "strategy=tp", f"cluster.memory_budget={budget}")
    assert first_layers(plan_reference(smaller.config, smaller), 120.0, NOTHING) == 3  # below its own 4
    root, shallow = shallower_runs(sharded, 5)
    assert shallow.layout == sharded.layout and is_single_process(root)
    for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
        assert getattr(shallow.config.model, key) == getattr(root.config.model, key)
    assert shallow.config.train == dataclasses.replace(root.config.train, loss_chunks=1)


@pytest.mark.parametrize(("seconds", "layers"), [(119.0, 5), (121.0, 4), (300.0, 2), (1e3, 2), (1e5, 1)])
def test_the_chain_goes_back_to_the_most_layers_that_are_cheap(seconds: float, layers: int) -> None:
    """`seconds` are those of five layers. Two are compared even if they are dear, but not beyond the time limit."""
    plan = plan_on(CPU, "strategy=tp", "model.num_hidden_layers=8")
    sharded = plan_reference(list(reference_configs(plan))[-1], plan)
    flops, _ = predict_cost(shallower_runs(sharded, 5)[0], (1.0, "a guess"))
    assert first_layers(sharded, 120.0, (flops / seconds, "a guess")) == layers


def test_a_budget_in_which_nothing_fits_is_a_sentence_without_remedies() -> None:
    note = get_reference(plan_on(CPU, "strategy=tp", "cluster.memory_budget=1MiB"), RunContext()).note
    assert note.startswith("none: a single process cannot be run: model=tiny needs ")
    assert note.count("cluster.memory_budget=1MiB is less") == 3 and "choose" not in note


def test_an_early_reference_costs_what_the_plan_or_the_devices_peak_tells() -> None:
    overrides = ("strategy=fsdp_full_shard", "model=7b", "precision=bf16_mixed", "world_size=8", "train.seq_len=4096")
    plan = plan_on(H100, *overrides)
    root, full, zero3, _, _ = (plan_reference(config, plan) for config in reference_configs(plan))
    steps = plan.config.train.total_steps
    for run, trainings in ((root, TRAININGS), (plan, 1)):
        assert run.prediction is not None
        seconds = trainings * steps * run.prediction.step_seconds
        assert predict_cost(run, NOTHING) == (pytest.approx(seconds), "the plan for NVIDIA H100 80GB HBM3")
    costs = [predict_cost(run, NOTHING)[0] for run in (full, root, zero3)]
    assert costs[0] > costs[1] > 3 * costs[2]  # recomputed by one device, and shared by eight
    flops = TRAININGS * steps * executed_flops(root.config, root.layout, "cuda")
    assert predict_cost(root, (1e14, "another run")) == (pytest.approx(flops / 1e14), "another run")
    source = "40% of the peak of the slowest known device of compute capability 9.0"  # an H20
    assert of_unknown_device(root, (9, 0)) == (pytest.approx(flops / (ASSUMED_MFU * 148e12)), source)
    for capability in ((12, 1), None):
        assert of_unknown_device(root, capability)[0] == 0.0
    assert predict_cost(plan_reference(single_process(plan.config), plan_on(CPU, "strategy=tp")), NOTHING)[0] == 0.0


NOTHING = (0.0, "")  # has been measured


def of_unknown_device(plan: RunPlan, capability: tuple[int, int] | None) -> tuple[float, str]:
    """Return what a run costs on a device that has no such name."""
    machine = dataclasses.replace(plan.machine, device_name="NVIDIA H100 MIG 3g.40gb", compute_capability=capability)
    return predict_cost(dataclasses.replace(plan, machine=machine), NOTHING)


def test_a_reference_that_is_predicted_to_be_slow_is_skipped_with_a_sentence() -> None:
    """On a GPU a layout on more devices is tried, which is too slow here as well; nothing is launched."""
    overrides = ("model=7b", "precision=bf16_mixed", "world_size=8", "train.global_batch=512", "timeout_seconds=10")
    reference = get_reference(plan_on(H100, "strategy=tp", *overrides), RunContext(log=pytest.fail))
    assert reference.report is None
    assert reference.note.startswith("none: a single process is too slow: it would train for ")
    slow = "at the speed of the plan for NVIDIA H100 80GB HBM3, more than 50% of timeout_seconds=10"
    assert reference.note.count(slow) == 4
    assert f"; fsdp_full_shard on 8 ranks {FULL} is too slow: " in reference.note


def fingerprint(name: str, box: tuple[tuple[int, int], ...], square: float | None) -> TensorFingerprint:
    return TensorFingerprint(name, (4, 2), box, square, 2.0)


def test_the_report_of_several_ranks_is_that_of_one_process() -> None:
    upper, lower, whole = ((0, 3), (0, 2)), ((3, 4), (0, 2)), ((0, 4), (0, 2))
    first = RankReport(
        losses=[1.0, None],
        grad_norms=[3.0, 4.0],
        first_gradients=[fingerprint("a", upper, 1.5), fingerprint("b", whole, 7.0), fingerprint("c", upper, 1.0)],
        gradient_squares=[[1.5, 7.0, 1.0], [1.0, 5.0, None]],
    )
    second = RankReport(
        rank=1,
        losses=[2.0, 2.0],
        grad_norms=[3.0, 4.0],
        first_gradients=[fingerprint("a", lower, 2.5), fingerprint("b", whole, 7.0), fingerprint("c", lower, None)],
        gradient_squares=[[2.5, 7.0, None], [3.0, 5.0, 1.0]],
    )
    merged = merge_reports([first, second])
    assert (merged.losses, merged.grad_norms, merged.rank) == ([1.5, None], [3.0, 4.0], 0)
    assert merged.first_gradients == [
        TensorFingerprint("a", (4, 2), whole, 4.0, 4.0),
        TensorFingerprint("b", (4, 2), whole, 7.0, 2.0),  # copies count once
        TensorFingerprint("c", (4, 2), whole, None, 4.0),
    ]
    assert merged.gradient_squares == [[4.0, 7.0, None], [4.0, 5.0, None]]
    assert merge_reports([first]) is first
