"""The machine's GPUs as NVML or CUDA describes them, by tables of the answers of machines that are not here."""

import json
import subprocess
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pynvml
import pytest
import torch

from harness.config.schema import ClusterConfig, RequestedDevice
from harness.hardware import cuda_devices, nvml
from harness.hardware.machine import Machine
from harness.launcher.outcome import LaunchOutcome
from harness.measure import cuda_query, environment, host_usage
from harness.records.rank_report import LaunchStatus
from harness.runner import launch_run, resolve
from harness.runner.launch_run import RunContext
from harness.runner.plan import RunPlan
from harness.util.text import UserError
from tests.support.commands import compose_config
from tests.support.nvml_tables import GIB, Board, install

TWO = (Board(), Board(uuid="GPU-1b2f1a11-0000-0000-0000-000000000001", memory=(40 * GIB, 80 * GIB)))


def machine(device: RequestedDevice = "auto") -> Machine:
    return resolve.detect_machine(ClusterConfig("local", device=device))


def answer(devices: list[Any] | None, error: str = "") -> SimpleNamespace:
    """Return how a process ends that is asked for the devices; None if CUDA refuses to say."""
    return SimpleNamespace(returncode=int(devices is None), stdout=json.dumps(devices), stderr=error)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Return what stands for the start of the process that would ask CUDA."""
    run = MagicMock()
    monkeypatch.setattr(cuda_devices.subprocess, "run", run)
    return run


def test_nvml_alone_describes_a_machine_where_it_answers(monkeypatch: pytest.MonkeyPatch, cuda: MagicMock) -> None:
    install(monkeypatch, TWO)
    detected = machine()
    assert (detected.device, detected.devices, detected.ranks_per_node) == ("cuda", 2, 2)
    assert detected.free_bytes == (79 * GIB, 40 * GIB) and detected.device_bytes == 80 * GIB
    assert detected.compute_capability == (9, 0) and detected.device_names == ("NVIDIA H100 80GB HBM3",) * 2
    cuda.assert_not_called()


REFUSALS: dict[str, dict[str, Any]] = {
    "no library": {"init": pynvml.NVMLError_LibraryNotFound},
    "no driver": {"init": pynvml.NVMLError_DriverNotLoaded},
    "another version": {"init": pynvml.NVMLError_LibRmVersionMismatch},
    "no memory (GB10, Jetson)": {"board": {"memory": pynvml.NVMLError_NotSupported}},
    "no rights": {"board": {"memory": pynvml.NVMLError_NoPermission}},
    "no name": {"board": {"name": pynvml.NVMLError_Unknown}},
    "MIG without its instances": {"board": {"mig": (1, 1)}, "count": 8},
    "an unknown UUID": {"variables": {"CUDA_VISIBLE_DEVICES": "GPU-ffffffff"}},
    "an unknown MIG instance": {"variables": {"CUDA_VISIBLE_DEVICES": "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"}},
    "ROCm": {"hip": "6.4"},
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_cuda_is_asked_where_nvml_refuses_and_nobody_by_a_run_on_the_cpu(
    refusal: dict[str, Any], monkeypatch: pytest.MonkeyPatch, cuda: MagicMock
) -> None:
    options = dict(refusal)
    install(monkeypatch, [Board(**options.pop("board", {}))], **options)
    cuda.return_value = answer([["NVIDIA GB10", 100 * GIB, 119 * GIB, [12, 1]]])
    assert machine("cpu").device == "cpu" and not cuda.called
    detected = machine()
    assert (detected.device, detected.devices, detected.device_name) == ("cuda", 1, "NVIDIA GB10")
    assert detected.free_bytes == (100 * GIB,) and detected.compute_capability == (12, 1)
    ((command,), options) = cuda.call_args
    assert cuda.call_count == 1 and command[1:] == ["-m", "harness.measure.cuda_query"]
    assert options["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and options["timeout"] == 120


def test_devices_that_nobody_describes_are_one_sentence(monkeypatch: pytest.MonkeyPatch, cuda: MagicMock) -> None:
    install(monkeypatch, TWO, init=pynvml.NVMLError_DriverNotLoaded)
    cuda.return_value = answer(None, "Traceback\nRuntimeError: No CUDA GPUs are available")
    with pytest.raises(UserError, match=r"2 CUDA devices.*Driver Not Loaded.*No CUDA GPUs.*cluster\.device=cpu"):
        machine()
    cuda.side_effect = subprocess.TimeoutExpired("python", 120)
    with pytest.raises(UserError, match="no answer within 120 s"):
        machine("cuda")


VISIBLE = {
    "1": ["GPU-1b"],
    " 1 , 0": ["GPU-1b", "GPU-89"],
    "GPU-8932f937": ["GPU-89"],
    "GPU-1b,GPU-8932f937-d72c-4106-c12f-20bd9faed9f6": ["GPU-1b", "GPU-89"],
    "1,-1,0": ["GPU-1b"],
    "1gpu,0gpu": ["GPU-1b", "GPU-89"],
    "+1": ["GPU-1b"],
}


@pytest.mark.parametrize("visible", VISIBLE)
def test_every_form_of_cuda_visible_devices_finds_the_device_that_cuda_uses(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How torch reads the variable says how many devices there are."""
    expected = VISIBLE[visible]
    install(monkeypatch, TWO, variables={"CUDA_VISIBLE_DEVICES": visible})
    uuids = [device.handle.uuid for device in nvml.visible_devices(len(expected))]
    assert all(uuid.startswith(start) for uuid, start in zip(uuids, expected, strict=True))
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: [board.uuid for board in TWO])
    assert torch.cuda._device_count_nvml() == len(expected)


def test_a_uuid_that_two_devices_begin_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, TWO, variables={"CUDA_VISIBLE_DEVICES": "GPU-"})
    with pytest.raises(nvml.NvmlError, match="2 devices have a UUID that begins with GPU-"):
        nvml.visible_devices(1)


def test_rocm_names_its_devices_by_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, TWO, variables={"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1,0"})
    assert nvml.visible_device_ids(2) == ["1", "0"]


def test_the_process_that_asks_cuda_counts_instances_and_not_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two boards are counted by torch, of which MIG leaves one instance: CUDA refuses the second number."""
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * GIB, 5 * GIB))
    query = MagicMock()
    monkeypatch.setattr(torch.cuda, "get_device_properties", query)
    for hip, capability in ((None, (8, 0)), ("6.4", None)):
        monkeypatch.setattr(torch.version, "hip", hip)
        query.side_effect = [properties, AssertionError("Invalid device id")]
        assert list(cuda_query.describe_devices()) == [(properties.name, 4 * GIB, 5 * GIB, capability)]
    query.side_effect = AssertionError
    with pytest.raises(AssertionError):
        list(cuda_query.describe_devices())


def test_gpus_that_slurm_gave_and_torch_does_not_see_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [], variables={"SLURM_GPUS_ON_NODE": "8"})
    with pytest.raises(UserError, match=r"finds none of this Slurm job.s 8 GPUs through torch"):
        machine()
    assert machine("cpu").device == "cpu"
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert machine().device == "cpu"


def test_devices_of_two_models_are_not_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, (*TWO, Board(uuid="GPU-2", name="NVIDIA A40", capability=(8, 6))))
    detected = machine()
    assert detected.device_problem(2) is None and detected.compute_capability == (8, 6)
    assert "NVIDIA H100 80GB HBM3 and NVIDIA A40" in str(detected.device_problem(3))


def test_the_environment_is_that_of_the_devices_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs side by side use different devices of one count, one after another in the same process."""
    boards = (Board(name="NVIDIA A"), Board(name="NVIDIA B", uuid="GPU-1b"))
    monkeypatch.setattr(nvml.NvmlDevice, "power_limit_watts", lambda _: None)
    environment._devices.cache_clear()
    names = []
    for visible in ("0", "1"):
        install(monkeypatch, boards, count=1, variables={"CUDA_VISIBLE_DEVICES": visible})
        names.append(environment.collect_environment(machine())["device_names"])
    environment._devices.cache_clear()
    assert names == [["NVIDIA A"], ["NVIDIA B"]]


def test_memory_that_killed_ranks_still_hold_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    answers = iter([(10 * GIB, 70 * GIB), (60 * GIB, 79 * GIB), (79 * GIB, 79 * GIB)])
    before = (79 * GIB, 79 * GIB)
    monkeypatch.setattr(cuda_devices.time, "sleep", pauses.append)
    for answer in (lambda: next(answers), lambda: before):
        assert cuda_devices.wait_for_release(before, answer) is None and len(pauses) == 2


def test_memory_that_another_process_took_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_devices, "RELEASE_SECONDS", 0.0)
    install(monkeypatch, [Board(), Board(processes=[(4711, 30 * GIB), (12, None)])])
    problem = cuda_devices.wait_for_release((79 * GIB,) * 2, lambda: (79 * GIB, 49 * GIB))
    assert problem == (
        "0 s after the run device 1 has 30.0 GiB less free memory than before it; it is in use by process 12, process"
        " 4711 with 30.0 GiB"
    )
    install(monkeypatch, [], init=pynvml.NVMLError_LibraryNotFound)
    assert "process" not in str(cuda_devices.wait_for_release((79 * GIB,), lambda: (0,)))


def test_the_next_run_starts_after_the_memory_is_free(monkeypatch: pytest.MonkeyPatch, cuda: MagicMock) -> None:
    install(monkeypatch, TWO)
    before = machine()
    assert resolve.release_problem(before, ClusterConfig("local")) is None
    monkeypatch.setattr(cuda_devices, "RELEASE_SECONDS", 0.0)
    install(monkeypatch, (Board(memory=(9 * GIB, 80 * GIB)), TWO[1]))
    assert "70.0 GiB less" in str(resolve.release_problem(before, ClusterConfig("local")))
    install(monkeypatch, TWO, init=pynvml.NVMLError_GpuIsLost)
    cuda.side_effect = subprocess.TimeoutExpired("python", 120)
    assert "GPU is lost" in str(resolve.release_problem(before, ClusterConfig("local")))


def test_a_rank_samples_its_own_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight ranks asks NVML about one device, five times a second, and none about all."""
    boards = [Board(uuid=f"GPU-{index}") for index in range(8)]
    install(monkeypatch, boards)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device.index)))
    for own in ([3], [*range(8)]):  # that of a rank, and those of nn.DataParallel's only rank
        meter = host_usage.HostUsageMeter([torch.device("cuda", index) for index in own], helpers=())
        assert [device.handle for device in meter.nvml_devices] == [boards[index] for index in own]
    assert host_usage.SAMPLE_SECONDS >= 0.2


@pytest.mark.parametrize(("status", "waits"), [("oom", 1), ("error", 1), ("timeout", 1), ("ok", 0), ("interrupted", 0)])
def test_only_a_failed_run_is_waited_for(status: LaunchStatus, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that was interrupted ends at once, and ranks that finished have released their devices."""
    outcome = LaunchOutcome(status, "", (), 1.0)
    notes: list[str] = []
    install(monkeypatch, TWO)
    plan = SimpleNamespace(
        machine=machine(),
        config=compose_config("strategy=ddp", "world_size=2"),
        command=SimpleNamespace(timeout_seconds=1.0, hang_seconds=1.0),
        folder=SimpleNamespace(path=None),
        layout=SimpleNamespace(world_size=2),
    )
    monkeypatch.setattr(launch_run, "launch", lambda *_, **__: outcome)
    monkeypatch.setattr(launch_run, "release_problem", lambda *_: "device 1 is in use")
    assert launch_run.run_ranks(cast("RunPlan", plan), RunContext(log=notes.append)) == outcome
    assert notes == ["device 1 is in use"] * waits
