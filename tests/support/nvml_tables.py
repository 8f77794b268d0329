"""Tables of NVML's answers for machines that are not here: pynvml's functions are replaced, all else is real."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from harness.hardware.machine import Machine

GIB = 2**30


@dataclass
class Board:
    """One device as NVML knows it; an answer may be an error that NVML raises."""

    uuid: str = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    name: Any = "NVIDIA H100 80GB HBM3"
    memory: Any = (79 * GIB, 80 * GIB)
    capability: Any = (9, 0)
    mig: Any = pynvml.NVMLError_NotSupported
    cores: Any = (0b11,)
    processes: Any = ()
    millijoules: Any = pynvml.NVMLError_NotSupported  # one answer, or an iterator of one after another
    links: Mapping[int, int] = field(default_factory=dict)  # index of another board -> pynvml's level of topology


def refuse_or(answer: Any) -> Any:
    """Return an answer of a table, or raise the error that it is."""
    if isinstance(answer, type) and issubclass(answer, BaseException):
        raise answer
    return answer


def install(
    patch: pytest.MonkeyPatch,
    boards: Sequence[Board],
    *,
    init: Any = None,
    count: int | None = None,
    hip: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Make pynvml answer from these boards, and torch count `count` devices; `init` is what nvmlInit answers."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        patch.delenv(name, raising=False)
    for name, value in (variables or {}).items():
        patch.setenv(name, value)

    def by_uuid(uuid: str) -> Board:
        return next((board for board in boards if board.uuid == uuid), None) or refuse_or(pynvml.NVMLError_NotFound)

    def by_index(index: int) -> Board:
        return boards[index] if index < len(boards) else refuse_or(pynvml.NVMLError_InvalidArgument)

    def memory(board: Board) -> SimpleNamespace:
        free, total = refuse_or(board.memory)
        return SimpleNamespace(free=free, total=total)

    def processes(board: Board) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in refuse_or(board.processes)]

    def energy(board: Board) -> int:
        answer = refuse_or(board.millijoules)
        return next(answer) if isinstance(answer, Iterator) else answer

    def topology(board: Board, other: Board) -> int:
        return board.links.get(boards.index(other), pynvml.NVML_TOPOLOGY_SYSTEM)

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: refuse_or(init),
        "nvmlDeviceGetCount": lambda: len(boards),
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda board: board.uuid,
        "nvmlDeviceGetName": lambda board: refuse_or(board.name),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetCudaComputeCapability": lambda board: refuse_or(board.capability),
        "nvmlDeviceGetMigMode": lambda board: refuse_or(board.mig),
        "nvmlDeviceGetCpuAffinity": lambda board, words: (*refuse_or(board.cores), *[0] * words)[:words],
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetTotalEnergyConsumption": energy,
        "nvmlDeviceGetP2PStatus": lambda *_: pynvml.NVML_P2P_STATUS_NOT_SUPPORTED,
        "nvmlDeviceGetTopologyCommonAncestor": topology,
        "nvmlSystemGetDriverVersion": lambda: "550.54.15",
    }
    for name, answer in answers.items():
        patch.setattr(pynvml, name, answer)
    patch.setattr(torch.cuda, "device_count", lambda: len(boards) if count is None else count)
    patch.setattr(torch.version, "hip", hip)


def gpus(count: int = 8, name: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> Machine:
    """Return a machine with so many GPUs, 16 cores and 200 GiB of free memory on the host, but for these changes."""
    sizes = {"host_free_bytes": 200 * GIB, "device_bytes": 80 * GIB, "compute_capability": (9, 0)}
    names = (name,) * count
    machine = Machine("cuda", name, 1, count, count, (79 * GIB,) * count, 16, device_names=names)
    return replace(machine, **sizes | changes)
