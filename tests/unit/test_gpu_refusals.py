"""Runs that a machine cannot make, or only slowly, or that do not fit it, and remedies that can be run and fit."""

import dataclasses
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import accelerate.utils.environment as accelerate_environment
import pytest
import torch

from harness.config.hydra import compose_values
from harness.config.schema import Device, RunConfig
from harness.engines import accelerate as accelerate_engine
from harness.engines.base import load_engine
from harness.hardware.machine import Machine
from harness.launcher.limits import core_note, shared_memory_note
from harness.layout.layout import resolve_layout
from harness.runner.plan import (
    capacity_problem,
    find_problems,
    machine_problems,
    make_plan,
)
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.util import native_build
from harness.util.text import UserError
from tests.support.commands import compose_config, compose_layout
from tests.support.models import PREPARED
from tests.support.nvml_tables import GIB, gpus


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


def test_little_shared_memory_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has 64 MiB by default, with which NCCL fails between GPUs that do not reach each other."""
    for free, is_little in ((2**26, True), (2**30, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        note = shared_memory_note("cuda", 8, tmp_path)
        assert ("64.0 MiB free" in note and "--shm-size=1g" in note) if is_little else note is None, note
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert shared_memory_note("cpu", 8, tmp_path) is None and shared_memory_note("cuda", 1, tmp_path) is None
    assert shared_memory_note("cuda", 8, tmp_path / "none") is None


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
    assert "export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1" in problem


@pytest.mark.parametrize("strategy", ["strategy=zero1", "strategy=zero1 strategy.engine=accelerate"])
def test_strategies_of_deepspeed_without_deepspeed_are_refused(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else real(name))
    config, layout = compose_layout(2, *strategy.split(), "model=tiny")
    listed = list(load_engine(layout.engine).unsupported(config, layout, gpus(2)))
    listed += find_problems(dataclasses.replace(config, launch="simulated"), layout, gpus(2))
    advice = "the package deepspeed: type DS_ACCELERATOR=cpu pip install 'training-harness[deepspeed]'"
    assert sum(advice in problem for problem in listed) == 2


def test_a_sharded_model_of_accelerate_needs_no_host_memory() -> None:
    """No rank ever holds the whole model: eight times 25 GiB for model=7b would not fit."""
    seven = compose_config(
        *("strategy=fsdp_full_shard", "strategy.engine=accelerate", "model=7b", "precision=bf16_mixed"),
        *("train.global_batch=8", "train.micro_batch=1", "checkpointing=full"),
    )
    assert capacity_problem(make_plan(seven, gpus(host_free_bytes=100 * GIB)), ()) is None
    with pytest.raises(UserError):
        make_plan(seven, dataclasses.replace(gpus(), device="cpu"))


BATCH = ("train.global_batch=16", "train.micro_batch=2", "train.seq_len=128", "data=synthetic")

WITHOUT_VOCABULARY_TP = "strategy.tp=2 strategy.vocabulary_parallel=false"

# Each run with the kinds of remedies that must be offered, in this order and no others, if memory is one byte short.
CASES = {
    "strategy=zero3": "world_size precision checkpointing micro_batch offload model",
    "strategy=fsdp_full_shard precision=bf16_mixed": "world_size checkpointing micro_batch offload model",
    # More ranks would hold no more shards.
    "strategy=fsdp_shard_grad_op strategy.dp_shard=4": "strategy precision checkpointing micro_batch offload model",
    "strategy=zero3 strategy.dp_shard=4 train.global_batch=8": "precision checkpointing micro_batch offload model",
    "strategy=ddp checkpointing.offload_activations=true train.seq_len=1024": (
        "strategy precision checkpointing micro_batch model"
    ),
    "strategy=pp_zero_bubble": "world_size precision checkpointing micro_batch model",
    "strategy=pp_1f1b train.compile=true": "world_size precision checkpointing micro_batch model",
    "strategy=tp train.compile=true": "world_size precision checkpointing micro_batch model",
    "strategy=single checkpointing=selective": "strategy precision saved_products checkpointing micro_batch model",
    f"strategy=zero1 {WITHOUT_VOCABULARY_TP}": "world_size precision checkpointing micro_batch offload model",
    f"precision=bf16_mixed strategy=zero2 {WITHOUT_VOCABULARY_TP}": "world_size offload model",
}


def offered(reason: str) -> list[list[str]]:
    """Return the settings of each remedy, without those that try the run as it is or change the budget."""
    texts = reason.partition(": choose ")[2].split(", or ")
    names = [text.partition(" (")[0].replace(" on more such machines", "").replace(" and ", " ") for text in texts]
    return [name.split() for name in names if "=" in name and name != "preflight=false to try"]


def kind(remedy: list[str]) -> str:
    """Return the last part of the key of a remedy's first setting."""
    return remedy[0].partition("=")[0].rpartition(".")[2]


def with_remedy(overrides: tuple[str, ...], remedy: list[str]) -> list[str]:
    """Return the overrides with a remedy; another strategy takes the place of the first with its keys."""
    keys = {text.partition("=")[0] for text in remedy}
    rest = [text for text in overrides if text.partition("=")[0] not in keys]
    if "strategy" in keys:
        rest = [text for text in rest if not text.startswith("strategy.")]
    return [*rest, *remedy]


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_is_itself_accepted_and_fits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "triton_problem", lambda capability: None)  # as on the GPUs of these machines
    overrides = ("model=350m", "world_size=4", "model.tie_word_embeddings=false", *BATCH, *case.split())
    overrides = tuple({text.partition("=")[0]: text for text in overrides}.values())
    device: Device = "cpu" if "offload" in case else "cuda"  # of a GPU's memory full saves nothing beside offload
    large_machine = Machine(device, "", 1, 4, devices=64, free_bytes=(2**45,) * 64, cores=2, host_free_bytes=2**45)
    plan = make_plan(compose_config(*overrides), large_machine)
    needed = plan.memory.needed_bytes * (4 if device == "cpu" else 1)
    small_machine = dataclasses.replace(large_machine, free_bytes=(needed - 1,) * 64)
    reason = capacity_problem(dataclasses.replace(plan, machine=small_machine), PREPARED)
    remedies = offered(reason or "")
    assert " ".join(dict.fromkeys(map(kind, remedies))) == CASES[case], reason
    for remedy in remedies:
        changed = make_plan(compose_config(*with_remedy(overrides, remedy)), small_machine)
        assert capacity_problem(changed, PREPARED) is None, remedy


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        ("strategy=ddp model=7b", "strategy=fsdp_full_shard"),
        ("strategy=single model=7b", "strategy=fsdp_full_shard"),
        ("strategy=cp model=7b", "strategy.data_parallel=fsdp strategy.zero_stage=3"),
        ("strategy=zero3 model=8b world_size=4", "world_size=8"),
        ("strategy=zero3 model=70b", "checkpointing=full world_size=32 train.global_batch=64"),
        ("strategy=ddp model=30b train.micro_batch=6", "strategy=fsdp_full_shard checkpointing=full"),
    ],
)
def test_the_first_remedy_keeps_the_model(overrides: str, first: str) -> None:
    """What is offered first can be run on the same machine, or on more of them, with the model of the user."""
    settings = (*overrides.split(), "data=synthetic", "tracking=none")
    machine = gpus(host_free_bytes=2**40)
    values = resolve_auto(compose_values(*settings), machine.device, machine.compute_capability)
    reason = capacity_problem(make_plan(resolve_run_config(values), machine), PREPARED) or ""
    remedies = offered(reason)
    assert " ".join(remedies[0]) == first, reason
    models = [remedy for remedy in remedies if kind(remedy) == "model"]
    assert models == [] or models == remedies[-1:]
