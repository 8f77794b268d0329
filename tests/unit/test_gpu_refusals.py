"""Runs that a machine with GPUs cannot make, or only slowly, and which are refused before a process starts."""

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils.environment as accelerate_environment
import pytest
import torch

from harness.config.schema import RunConfig
from harness.engines import accelerate as accelerate_engine
from harness.engines.base import load_engine
from harness.hardware.machine import Machine
from harness.layout.layout import resolve_layout
from harness.runner.plan import capacity_problem, core_note, find_problems, machine_problems, make_plan
from harness.util import native_build
from harness.util.text import UserError
from tests.support.commands import compose_config

GIB = 2**30


def gpus(count: int = 8, name: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> Machine:
    machine = Machine("cuda", name, 1, count, devices=count, free_bytes=(79 * GIB,) * count, cores=16)
    names = (name,) * count
    defaults = {"host_free_bytes": 200 * GIB, "device_bytes": 80 * GIB, "compute_capability": (9, 0)}
    return dataclasses.replace(machine, device_names=names, **defaults | changes)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose_config("strategy=ddp", "model=tiny", "precision=bf16_mixed", "train.compile=true")


def problems(config: RunConfig, machine: Machine) -> list[str]:
    return list(find_problems(config, resolve_layout(config.strategy, 2), machine))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make Triton, a C compiler and Python's headers seem to be there; return the folder of headers."""
    (tmp_path / "Python.h").touch()
    real = importlib.util.find_spec
    monkeypatch.setattr(native_build.importlib.util, "find_spec", lambda name: name == "triton" or real(name))
    monkeypatch.setattr(native_build.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(native_build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_a_gpu_with_triton_and_a_compiler_compiles(config: RunConfig, triton: Path) -> None:
    assert problems(config, gpus()) == []


def test_compiling_for_a_gpu_without_its_tools_is_refused(
    config: RunConfig, triton: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = problems(dataclasses.replace(config, precision=FP32), gpus(2, "Tesla P100", compute_capability=(6, 0)))
    assert "compute capability 7.0" in problem and "train.compile=false" in problem
    (triton / "Python.h").unlink()
    assert "python3-dev" in problems(config, gpus())[0]
    monkeypatch.setattr(native_build.shutil, "which", lambda name: None)
    assert "no C compiler" in problems(config, gpus())[0]
    monkeypatch.setenv("CC", "icx")
    assert "no C compiler" not in problems(config, gpus())[0]
    monkeypatch.setattr(native_build.importlib.util, "find_spec", lambda _: None)
    assert "triton is not installed" in problems(config, gpus())[0]


FP32 = compose_config("strategy=ddp", "model=tiny").precision


@pytest.mark.parametrize(
    ("machine", "refused"),
    [
        (gpus(2, "Tesla T4", compute_capability=(7, 5)), True),
        (gpus(2, "Tesla V100-SXM2-16GB", compute_capability=(7, 0)), True),
        (gpus(2, "NVIDIA A100-SXM4-40GB", compute_capability=(8, 0)), False),
        (gpus(2, "AMD Instinct MI300X", compute_capability=None), False),
    ],
    ids=lambda value: getattr(value, "device_name", ""),
)
def test_emulated_16_bit_is_refused(
    machine: Machine, refused: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is torch's own, which this test asks about the same devices."""
    layout = resolve_layout(config.strategy, 2)
    listed = [text for text in machine_problems(config, layout, machine) if text.startswith("precision=")]
    assert len(listed) == refused and all("choose fp32 or fp16_mixed" in problem for problem in listed)
    in_fp32 = machine_problems(dataclasses.replace(config, precision=FP32), layout, machine)
    assert not any(text.startswith("precision=") for text in in_fp32)
    major = (machine.compute_capability or (9, 4))[0]
    monkeypatch.setattr(torch.version, "hip", None if machine.compute_capability else "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    assert torch.cuda.is_bf16_supported(including_emulation=False) is not refused


def test_few_cores_are_noted() -> None:
    assert core_note("cuda", 8, 16) is None and core_note("cpu", 8, 1) is None
    assert str(core_note("cuda", 8, 1)).startswith("8 ranks on GPUs and 1 core, fewer than 2 for a rank")


DRIVERS = {
    (2, "NVIDIA GeForce RTX 4090", "535.183.01"): True,
    (2, "NVIDIA GeForce RTX 4090", "550.40.06"): True,
    (2, "NVIDIA GeForce RTX 4090", "550.40.07"): False,
    (2, "NVIDIA GeForce RTX 4090", "550.54.15"): False,
    (1, "NVIDIA GeForce RTX 4090", "535.183.01"): False,
    (2, "NVIDIA GeForce RTX 3090", "535.183.01"): False,
}


@pytest.mark.parametrize(("case", "refused"), DRIVERS.items(), ids=str)
def test_what_accelerate_rejects_is_refused(
    case: tuple[int, str, str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed Accelerate answers from the same table of nvidia-smi's words."""
    count, name, driver = case
    for variable in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(accelerate_environment, "get_gpu_info", lambda: ([name] * count, count))
    monkeypatch.setattr(accelerate_environment, "get_driver_version", lambda: driver)
    assert accelerate_environment.check_cuda_p2p_ib_support() is not refused
    assert accelerate_engine.needs_slower_nccl(gpus(count, name), driver) is refused
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert accelerate_engine.needs_slower_nccl(gpus(count, name), driver) is refused
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert not accelerate_engine.needs_slower_nccl(gpus(count, name), driver)


def test_the_refusal_names_accelerates_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate_engine, "driver_version", lambda: "535.183.01")
    config = compose_config("strategy=ddp", "strategy.engine=accelerate", "model=tiny")
    (problem,) = problems(config, gpus(2, "NVIDIA GeForce RTX 4090", compute_capability=(8, 9)))
    assert "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1" in problem


@pytest.mark.parametrize("strategy", ["strategy=zero1", "strategy=zero1 strategy.engine=accelerate"])
def test_strategies_of_deepspeed_without_deepspeed_are_refused(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else real(name))
    config = compose_config(*strategy.split(), "model=tiny")
    layout = resolve_layout(config.strategy, 2)
    listed = list(load_engine(layout.engine).unsupported(config, layout, gpus(2)))
    assert any(
        "deepspeed, which is not installed" in problem and "DS_ACCELERATOR=cpu pip" in problem for problem in listed
    )


def test_a_sharded_model_of_accelerate_needs_no_host_memory() -> None:
    """No rank ever holds the whole model: eight times 25 GiB for model=7b would not fit."""
    seven = compose_config(
        *("strategy=fsdp_full_shard", "strategy.engine=accelerate", "model=7b", "precision=bf16_mixed"),
        *("train.global_batch=8", "train.micro_batch=1", "checkpointing=full"),
    )
    assert capacity_problem(make_plan(seven, gpus(host_free_bytes=100 * GIB)), ()) is None
    with pytest.raises(UserError):
        make_plan(seven, dataclasses.replace(gpus(), device="cpu"))
