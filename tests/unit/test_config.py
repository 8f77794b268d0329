"""Configurations: what identifies a run, what a command decides, and the values that a field takes."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from harness.config.command import CommandConfig, merge_values, read_command_config, read_run_config
from harness.config.fingerprint import make_run_id, result_affecting_keys
from harness.config.hydra import compose_values
from harness.config.schema import RunConfig
from harness.hardware.machine import Machine
from harness.runner import plan as run_plan
from harness.runner.plan import capacity_problem, make_plan
from harness.runner.record import fallback_run_id
from harness.runner.resolve import resolve_auto
from harness.util.text import UserError
from tests.support.commands import compose, compose_config

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


CPU = Machine("cpu", "cpu", 2, 2, 0, (2**34,), 2)


def virtual_config(*overrides: str) -> RunConfig:
    return compose_config("strategy=ddp", "data=synthetic", "launch=virtual", *overrides)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("simulate.rank=4",), "^simulate.rank=4 is not one of the 4 ranks: choose 0 to 3$"),
        (("cluster.nodes=2",), "^cluster.nodes=2 with launch=virtual, which runs one rank on this machine: choose 1"),
        (("strategy=dp", "world_size=1"), "has one rank, which needs all its devices: choose launch=processes$"),
    ],
)
def test_what_a_virtual_run_cannot_do_is_refused(overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        make_plan(virtual_config("world_size=4", *overrides), CPU)


def test_a_virtual_run_needs_a_process_group_that_fills_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "torch_release", lambda: (2, 12))
    with pytest.raises(UserError, match=r"^launch=virtual needs torch 2\.13: the fake process group"):
        make_plan(virtual_config(), CPU)


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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            "strategy.schedule=zbv",
            "strategy.schedule=zbv is not known: choose gpipe, 1f1b, interleaved_1f1b, zero_bubb",
        ),
        ("strategy.data_parallel=dp", "strategy.data_parallel=dp is not known: choose none, ddp, fsdp"),
        ("strategy.offload=all", "strategy.offload=all is not known: choose none, optimizer, parameters"),
        (
            "checkpointing.name=half",
            "checkpointing=half is not known: choose none, full, every_n, selective, attention",
        ),
        ("cluster.device=tpu", "cluster.device=tpu is not known: choose auto, cpu, cuda"),
        ("launch=script", "launch=script is not known"),
        ("launch=threads", "launch=threads is not known: choose processes, virtual, simulated"),
        ("retry=[never]", "retry=never is not known: choose error, timeout, oom"),
        ("strategy.schedule=3", "strategy.schedule=3 is not text: give it text"),
        ("model=gpt_tiny model.dropout=1.5", "model.dropout=1.5 must be in [0, 1)"),
        ("strategy.options=5", "strategy.options=5 is not a group like {key: value}"),
        ("train.seed=9223372036854775808", "train.seed=9223372036854775808 does not fit 64 bits"),
        ("timeout_seconds=0", "timeout_seconds=0.0 is not positive: choose seconds"),
    ],
)
def test_a_wrong_value_is_named_with_its_choices(overrides: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(problem)}"):
        compose(*overrides.split())


def test_a_command_has_defaults() -> None:
    assert CommandConfig().name == "runs" and CommandConfig().tracking.name == "none"
