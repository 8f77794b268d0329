"""Configurations: what identifies a run, the values that a field takes, automatic ones, and those of the guide."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from harness.config.arguments import normalize_arguments
from harness.config.command import CommandConfig, merge_values, read_command_config, read_run_config
from harness.config.fingerprint import make_run_id, result_affecting_keys
from harness.config.from_dict import from_dict, is_group
from harness.config.hydra import compose_values
from harness.config.mistakes import known_keys
from harness.config.schema import Device, RunConfig
from harness.cost_model.flops import model_flops
from harness.cost_model.memory import estimate_memory
from harness.hardware.machine import Machine
from harness.layout.layout import resolve_layout
from harness.runner import plan as run_plan
from harness.runner.plan import capacity_problem, make_plan
from harness.runner.record import fallback_run_id
from harness.runner.resolve import machine_of_run, resolve_auto, resolve_run_config
from harness.selftest.run import each_run
from harness.util.text import UserError
from tests.support.commands import ROOT, compose, compose_config

# Run ids of the first release. The same configuration must keep its id, or no stored record could be reused.
RUN_IDS = {
    "strategy=ddp": "ddp-none-tiny-w2-bc34c732fe",
    "strategy=zero3 checkpointing=full precision=bf16_mixed world_size=4": "zero3-full-tiny-w4-eb5d2284ab",
    "strategy=3d model=125m train.micro_batch=2 repeat=3": "3d-none-125m-w2-9e6c0526c8",
    "strategy=fsdp_full_shard model=gpt_tiny cluster.memory_budget=1GiB cluster.partition=gpu cluster.time='1:00:00'": (
        "fsdp_full_shard-none-gpt_tiny-w2-0f8c955562"
    ),
    "strategy=pp_1f1b strategy.schedule=gpipe train.compile=true name=other results_dir=/x force=true retry=[error]"
    " timeout_seconds=5 proof.reference=false measure.memory_snapshot=true sweep.parallel=2": (
        "pp_1f1b-none-tiny-w2-d63577a21a"
    ),
}


def values_of(*overrides: str) -> dict[str, Any]:
    return dict(resolve_auto(compose_values(*overrides), "cpu"))


def run_id(config: RunConfig) -> str:
    return make_run_id(config, "cpu, 2 cores, x86_64", config.world_size or 2, "0123456789")


def test_configurations_keep_their_run_ids() -> None:
    assert {overrides: run_id(compose_config(*overrides.split())) for overrides in RUN_IDS} == RUN_IDS


@pytest.mark.parametrize("more", ["", "force=true retry=[oom] stop_after=[1h] sweep.parallel=2"])
def test_impossible_values_keep_their_run_id(more: str) -> None:
    values = values_of("train.steps=0", "strategy=ddp", "tracking=none", "data.cache=/nowhere", *more.split())
    assert fallback_run_id(values) == "ddp-none-tiny-fbebb0ee80"


@settings(deadline=None)
@given(strategies.text(), strategies.text())
def test_a_run_has_one_folder_whatever_its_names(strategy: str, model: str) -> None:
    config = compose_config("strategy=ddp")
    named = dataclasses.replace(config.strategy, name=strategy), dataclasses.replace(config.model, name=model)
    changed = run_id(dataclasses.replace(config, strategy=named[0], model=named[1]))
    assert Path(changed).parts == (changed,) and "\0" not in changed and len(changed.encode()) <= 200
    assert not changed.startswith(".")  # a hidden folder is no run's
    assert changed != run_id(config)  # names that look alike in an id are told apart by its hash


def test_nothing_that_a_command_decides_is_part_of_the_identity() -> None:
    config, command = compose("strategy=ddp")
    assert result_affecting_keys(dataclasses.asdict(command)) == {}
    both = result_affecting_keys(merge_values(config, command))
    assert "launch" not in both and both == result_affecting_keys(config.to_dict())


def test_what_is_part_of_the_identity() -> None:
    """Ranks that are no processes, and the saved products unless all are saved."""
    selective = compose_config("strategy=ddp", "checkpointing=selective")
    every_second = compose_config(
        "strategy=ddp", "checkpointing=selective", "checkpointing.saved_products=every_second"
    )
    plain, virtual = (compose_config("strategy=ddp", f"launch={name}") for name in ("processes", "virtual"))
    assert len({run_id(config) for config in (selective, every_second, plain, virtual)}) == 4
    expected = {"name": "selective", "every": 1, "offload_activations": False}
    assert result_affecting_keys(selective.to_dict())["checkpointing"] == expected


def test_a_simulated_run_is_of_its_device() -> None:
    """A record of a larger device does not say that a layout fits; a price, or a real run, asks for no figures."""
    words, sizes = ("strategy=ddp", "cluster=8xh100"), ("80GiB", f"{80 * 2**30}", "40GiB")
    figures = [*(f"cluster.hardware.memory={size}" for size in sizes), "cluster.hardware.memory_bandwidth=1e12"]
    simulated = [run_id(compose_config(*words, "launch=simulated", *figures[:1], word)) for word in figures]
    assert simulated[0] == simulated[1] and len(set(simulated)) == 3
    price = "cluster.hardware.price_per_device_hour=9"
    assert run_id(compose_config(*words, "launch=simulated", figures[0], price)) == simulated[0]
    assert len({run_id(compose_config(*words, word)) for word in figures}) == 1


CPU = Machine("cpu", "cpu", 1, 2, 0, (2**40,), 2)  # for two ranks, with memory for every command


def virtual_config(*overrides: str) -> RunConfig:
    return compose_config("strategy=ddp", "data=synthetic", "launch=virtual", *overrides)


def test_ranks_alone_need_a_torch_that_plays_what_their_layout_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "torch_release", lambda: (2, 12))
    make_plan(virtual_config("train.global_batch=8"), CPU)
    for strategy in ("strategy=pp_1f1b", "strategy=cp", "strategy=tp_sp"):
        with pytest.raises(UserError, match=r"^launch=virtual is wrong for pipelines, .* before torch 2\.13: type pip"):
            make_plan(virtual_config(strategy), CPU)
    for release in ((2, 12), (2, 15)):
        monkeypatch.setattr(run_plan, "torch_release", lambda release=release: release)
        with pytest.raises(UserError, match=r"^launch=simulated knows the operators of torch 2\.13"):
            make_plan(virtual_config("launch=simulated"), CPU)


def test_a_virtual_run_needs_the_device_of_one_rank() -> None:
    machine = Machine("cuda", "NVIDIA H200", 1, 1, 1, (2**37,), 16, device_bytes=2**37, device_names=("NVIDIA H200",))
    plan = make_plan(virtual_config("world_size=64", "train.global_batch=64"), machine)
    assert (plan.devices, plan.processes_per_node, plan.ranks_per_node) == (1, 1, 64)
    assert capacity_problem(plan, ()) is None
    eight = dataclasses.replace(plan.config, cluster=dataclasses.replace(plan.config.cluster, gpus_per_node=8))
    assert make_plan(eight, machine).ranks_per_node == 8
    real = make_plan(dataclasses.replace(plan.config, launch="processes"), machine)
    assert "needs 64 CUDA devices" in (capacity_problem(real, ()) or "")


def test_both_halves_make_the_recorded_configuration_and_are_read_from_it() -> None:
    config, command = compose("strategy=zero2", "name=both", "retry=[error]", "repeats=3")
    values = merge_values(config, command)
    assert read_run_config(values) == config and read_command_config(values) == command
    assert set(values) == set(values_of("strategy=zero2"))


def test_older_records_are_read_but_no_unknown_keys() -> None:
    values = values_of("strategy=ddp")
    older = {key: value for key, value in values.items() if key != "launch"}
    assert read_run_config(older) == read_run_config(older | {"launch": "script"}) == read_run_config(values)
    with pytest.raises(UserError, match=r"^colour is not a key: choose one of name, results_dir, .*, model, "):
        read_run_config(values | {"colour": "red"})


def test_a_command_has_defaults() -> None:
    assert CommandConfig().name == "runs" and CommandConfig().tracking.name == "none"


H100S = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 8, 8, (79 * 2**30,) * 8, 64, 2**40, device_bytes=80 * 2**30)

PEAK_FLOPS, UTILIZATION = 989e12, 0.4  # of an H100 in bfloat16; a usual share of it


def configured(device: Device, capability: tuple[int, int] | None, *overrides: str) -> RunConfig:
    values = compose_values(*overrides, "data=synthetic", "tracking=none")
    return resolve_run_config(resolve_auto(values, device, capability))


@pytest.mark.parametrize(
    ("device", "capability", "precision", "batch"),
    [
        ("cpu", None, "fp32", (8, 10, 3)),
        ("cuda", (7, 5), "fp32", (48, 30, 5)),
        ("cuda", (8, 0), "bf16_mixed", (48, 30, 5)),
        ("cuda", None, "bf16_mixed", (48, 30, 5)),  # AMD's
    ],
)
def test_defaults_suit_the_device(
    device: Device, capability: tuple[int, int] | None, precision: str, batch: tuple[int, int, int]
) -> None:
    config = configured(device, capability)
    assert config.precision.name == precision
    assert (config.train.global_batch, config.train.steps, config.train.warmup_steps) == batch
    stated = configured(device, capability, "precision=fp16_mixed", "train.steps=7", "train.global_batch=96")
    assert (stated.precision.name, stated.train.steps, stated.train.global_batch) == ("fp16_mixed", 7, 96)
    assert stated.train.warmup_steps == batch[2]


def test_seven_billion_parameters_on_eight_gpus_are_a_sensible_measurement() -> None:
    config = configured("cuda", (9, 0), "strategy=zero3", "model=7b")
    plan = make_plan(config, H100S)
    assert capacity_problem(plan, ()) is None
    peak_bytes = estimate_memory(plan.config, plan.layout, plan.widths, "cuda").peak_bytes
    assert 33 < peak_bytes / 2**30 < 36
    step_seconds = model_flops(config) / 8 / (UTILIZATION * PEAK_FLOPS)
    assert 2 < step_seconds < 4  # a GPU's energy counter needs two seconds
    assert config.train.steps >= 20 and config.train.total_steps * step_seconds < 180


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_the_batch_divides_over_usual_numbers_of_gpus(ranks: int) -> None:
    for overrides in (["model=7b"], ["sweeps=quickstart"], ["sweeps=checkpointing"]):
        config = configured("cuda", (9, 0), "strategy=ddp", *overrides)
        resolve_layout(config.strategy, ranks).grad_accumulation_steps(config.train)


def commands() -> list[list[str]]:
    """Return the overrides of every run that the guide's commands make, those of a sweep one after another."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "guides" / "simulation.md").read_text(), re.M | re.S)
    lines = [line.split()[1:] for block in blocks for line in block.splitlines() if "launch=" in line]
    sweeps = (" ".join(word for word in line if word != "-m") for line in lines)
    return [run.split() for sweep in sweeps for run in each_run(sweep)]


def plan(overrides: list[str]) -> None:
    config = compose_config(*overrides, "data=synthetic")
    make_plan(config, machine_of_run(config.to_dict(), lambda _: CPU))


@pytest.mark.parametrize("overrides", commands(), ids=" ".join)
def test_a_command_of_the_guide_can_be_planned(overrides: list[str]) -> None:
    plan(overrides)


def test_every_key_of_a_clusters_hardware_is_a_setting() -> None:
    """Also those that the cluster's file does not have, as the price; a group is set by its keys."""
    keys = [name for name, hint in known_keys().items() if name.startswith("cluster.hardware.") and not is_group(hint)]
    hardware = compose_values(*normalize_arguments(["cluster=8xh100", *(f"{key}=7" for key in keys)]))["cluster"][
        "hardware"
    ]
    assert len(keys) > 25 and {*hardware.pop("fitted").values(), *hardware.values()} == {7}


@pytest.mark.parametrize(
    "argument",
    [
        "+strategy._target_=builtins.print",
        "hydra.launcher._target_=builtins.print",
        "+hydra.callbacks.x._target_=builtins.print",
        "+strategy.options={a: {_target_: builtins.print}}",
        "strategy=planted",
        "sweeps=planted",
    ],
)
def test_no_setting_names_code_to_run(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, text in (
        ("conf/strategy", "_target_: builtins.print"),
        ("sweeps", "# @package _global_\nhydra: {callbacks: {x: {_target_: builtins.print}}}"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "planted.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"_target_ names code to run.*leave it out$") as refusal:
        normalize_arguments(["-m", argument])
    assert len(str(refusal.value).splitlines()) == 1


def test_a_stored_configuration_names_no_code() -> None:
    """The groups of keys that only a library knows are dicts, which older records and files of runs have too."""
    config = compose_config("strategy=ddp").to_dict()
    config["strategy"]["options"] = {"a": [{"_target_": "builtins.print"}]}
    with pytest.raises(UserError, match=r"^strategy\.options=.*_target_, which names code to run"):
        from_dict(RunConfig, config)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    """The check notices what the guide once said."""
    with pytest.raises(UserError, match="choose a multiple of 64"):
        plan(["launch=virtual", "strategy=zero3", "world_size=64", "model=350m"])
