"""Runs side by side on one machine's GPUs: which devices and cores each gets, by tables of machines not here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch import nn

from harness.config.schema import ClusterConfig
from harness.config.strategy import AXES
from harness.engines import nn_data_parallel
from harness.engines.torch import ddp
from harness.hardware import device_placement
from harness.hardware.device_placement import DevicePlacement, divide_cores, place_devices
from harness.hardware.machine import Machine
from harness.launcher.forkserver import rank_environment
from harness.probe import Probe
from harness.runner.plan import RunPlan, capacity_problem, make_plan
from harness.sweep import parallel, scheduler
from harness.sweep.display import ProgressDisplay
from harness.sweep.parallel import ParallelExecutor, WorkerSlot
from harness.sweep.queued_run import queue_plan
from harness.util.text import UserError
from tests.support.commands import compose_config, compose_layout
from tests.support.nvml_tables import Board, gpus, install

EIGHT = [Board(uuid=f"GPU-{index}", cores=(0x0F0F if index < 4 else 0xF0F0,)) for index in range(8)]

# Sixteen hyper-threads of eight cores: 8 is the second thread of core 0, and so on. Devices 0 to 3 are near the even
# NUMA node with the cores 0 to 3 and 8 to 11.
PHYSICAL = {core: core % 8 for core in range(16)}


def test_devices_get_whole_cores_of_their_own_numa_node() -> None:
    """The first devices are near the second node here, so that cores cut by their numbers would be the wrong ones."""
    near = [set(range(4, 8)) | set(range(12, 16))] * 4 + [set(range(4)) | set(range(8, 12))] * 4
    shares = divide_cores(near, range(16), PHYSICAL.__getitem__)
    assert shares == tuple((core, core + 8) for core in (4, 5, 6, 7, 0, 1, 2, 3))


@pytest.mark.parametrize(
    ("near", "cores", "shares"),
    [
        ([None, None], range(4), ((0, 1), (2, 3))),
        ([{0, 1}, {2, 3}], range(2), ((0,), (1,))),
        ([{0, 1}, {0, 1}, {0, 1}], range(4), ((0, 1), (0, 1), (0, 1))),
        ([{0, 1, 2}, {0, 1, 2}], range(3), ((0,), (1,))),
    ],
    ids=["unknown nodes", "a node that this process may not use", "fewer cores than devices", "a remainder"],
)
def test_every_device_has_cores(near: list[set[int] | None], cores: range, shares: tuple[tuple[int, ...], ...]) -> None:
    assert divide_cores(near, cores, lambda core: core) == shares


def test_hyper_threads_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_placement, "CPUS", tmp_path)
    for core, text in {1: "1,65\n", 65: "1,65\n", 6: "6-7\n", 9: "?"}.items():
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text)
    assert [device_placement.physical_core(core) for core in (1, 65, 6, 9, 3)] == [1, 1, 6, 9, 3]


def test_devices_that_are_linked_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices 1 and 3 are free before their neighbours: they share no switch, but 4 and 6 do."""
    boards = [Board(uuid=f"GPU-{index}", links={index ^ 2: pynvml.NVML_TOPOLOGY_SINGLE}) for index in range(8)]
    install(monkeypatch, boards)
    placement = place_devices(8, range(16))
    for free, closest in {(1, 4, 5, 6): (4, 6), (1, 4, 5): (1, 4), (1, 4): (1, 4)}.items():  # of three, all are as slow
        assert device_placement.closest_devices(placement.connections, free, 2) == closest
    assert device_placement.closest_devices(placement.connections, (1, 4), 1) == (1,)


def test_without_nvml_devices_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EIGHT, init=pynvml.NVMLError_LibraryNotFound, variables={"CUDA_VISIBLE_DEVICES": "3,5"})
    assert place_devices(2, range(4)) == DevicePlacement(("3", "5"), ((0, 1), (2, 3)))


def test_ranks_number_devices_as_nvml_does() -> None:
    """CUDA would number the fastest device first, so that a mixed machine's names and memory would be another's."""
    assert rank_environment("cuda", 1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in rank_environment("cpu", 1)


def plan_of(machine: Machine, *overrides: str) -> RunPlan:
    return make_plan(compose_config("model=tiny", "train.global_batch=16", *overrides), machine)


DP = ("strategy=dp", "train.micro_batch=8")


def test_nn_data_parallel_uses_as_many_devices_as_other_strategies_have_ranks() -> None:
    assert plan_of(gpus(8), *DP).devices == 8
    assert plan_of(gpus(8, ranks_per_node=4), *DP, "cluster.gpus_per_node=4").devices == 4
    assert plan_of(gpus(8), *DP, "world_size=2").devices == 2
    assert plan_of(gpus(8), "strategy=single").devices == 1 and plan_of(gpus(8), "strategy=ddp").devices == 8
    eight, four, four_of_eight = plan_of(gpus(8), *DP), plan_of(gpus(4), *DP), plan_of(gpus(8), *DP, "world_size=4")
    assert eight.run_id != four.run_id == four_of_eight.run_id
    with pytest.raises(UserError, match=r"train\.micro_batch=6 is scattered over 4 devices"):
        plan_of(gpus(8), "strategy=dp", "train.micro_batch=6", "train.global_batch=12", "world_size=4")
    with pytest.raises(UserError, match="strategy=dp needs two CUDA devices, 1 are used"):
        plan_of(gpus(8), *DP, "world_size=1")


def test_a_run_with_fewer_devices_than_it_was_planned_for_is_refused() -> None:
    plan = plan_of(gpus(8), *DP)
    object.__setattr__(plan, "machine", gpus(1, ranks_per_node=8))
    assert "needs 8 CUDA devices, and 1 are available" in str(capacity_problem(plan, ()))
    mixed = plan_of(gpus(2), "strategy=ddp")
    object.__setattr__(mixed, "machine", gpus(2, device_names=("NVIDIA A40", "NVIDIA A10")))
    assert "NVIDIA A40 and NVIDIA A10" in str(capacity_problem(mixed, ()))


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> ParallelExecutor:
    install(monkeypatch, EIGHT)
    monkeypatch.setattr(parallel, "usable_cores", lambda: list(range(16)))
    monkeypatch.setattr(device_placement, "physical_core", PHYSICAL.__getitem__)
    monkeypatch.setattr(scheduler, "detect_machine", lambda _: gpus(8))
    return ParallelExecutor("auto", (), ProgressDisplay())


def test_a_sweep_gives_every_run_the_devices_of_its_plan(executor: ParallelExecutor) -> None:
    machine = executor.machine(ClusterConfig("local"))
    assert executor.max_parallel == 8
    plans = plan_of(machine, *DP), plan_of(machine, "strategy=ddp", "world_size=2")
    data_parallel, pair = map(queue_plan, plans)
    assert executor.free_places(data_parallel) == tuple(range(8))
    for devices, cores in ((["0", "1"], {0, 1, 8, 9}), (["2", "3"], {2, 3, 10, 11})):
        pipe = Pipe()
        executor.slots.append(WorkerSlot(None, pipe))  # type: ignore[arg-type]
        executor.start(pair)
        assert pipe.sent == [(pair.plan, devices, cores)]
        assert executor.free_places(data_parallel) == ()


class Pipe:
    """A stand-in for the pipe of a worker process."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.send = self.sent.append


def test_a_sweep_of_runs_side_by_side_needs_devices_of_one_model(
    executor: ParallelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "detect_machine", lambda _: gpus(2, device_names=("NVIDIA A40", "NVIDIA A10")))
    with pytest.raises(UserError, match=r"sweep\.parallel=auto: the run would use NVIDIA A40 and NVIDIA A10"):
        executor.machine(ClusterConfig("local"))


def test_nn_data_parallel_is_built_over_the_devices_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is built on the CPU; what is recorded is the devices that nn.DataParallel would have."""
    wrapped: list[list[int]] = []
    monkeypatch.setattr(nn, "DataParallel", lambda module, device_ids: wrapped.append(device_ids) or module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(ddp, "materialize", lambda *_, **__: None)
    for overrides in (("world_size=4",), ("cluster.gpus_per_node=2",), ()):
        config, layout = compose_layout(1, "model=tiny", *DP, "train.global_batch=16", *overrides)
        mesh: Any = dict.fromkeys(AXES, SimpleNamespace(size=lambda: 1))
        device = torch.device("cuda")
        engine = nn_data_parallel.build(config, layout, mesh, device, Probe())
        assert engine.devices == len(wrapped[-1])
    assert wrapped == [[0, 1, 2, 3], [0, 1], list(range(8))]
