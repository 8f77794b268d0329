"""What is requested of torch's allocator on CUDA, with stand-ins for its answers, because there is no device."""

from typing import Any

import pytest
import torch

from harness.measure.allocation_logger import CudaAllocationLog
from harness.measure.memory import DeviceMemory

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(("backend", "can_log"), [("native", True), ("cudaMallocAsync", False)])
def test_only_torchs_own_allocator_has_a_history(monkeypatch: pytest.MonkeyPatch, backend: str, can_log: bool) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    assert DeviceMemory(DEVICE).can_log is can_log


def test_the_history_loads_no_unwinder(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stacks='all', its default, torch's C++ code loads an unwinder even where no stack is kept."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **named: options.update(named))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"segments": [], "device_traces": [[]]})
    CudaAllocationLog(DEVICE)
    assert options == {"context": None, "stacks": "python"}


def test_peaks_of_requests_and_of_waiting_blocks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever releases memory to another stream must wait for it: an allocated peak alone would leave that out."""
    statistics = {"requested_bytes.all.peak": 90, "active_bytes.all.peak": 140, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    counters = DeviceMemory(DEVICE).counters()
    peaks = (counters.peak_requested_bytes, counters.peak_allocated_bytes, counters.peak_active_bytes)
    assert peaks == (90, 100, 140) and counters.non_torch_bytes == 100
    statistics.clear()  # cudaMallocAsync has fewer statistics
    assert DeviceMemory(DEVICE).counters().peak_requested_bytes is None


def test_a_cpu_counts_requests() -> None:
    class Allocator:
        def peak_bytes(self) -> int:
            return 77

    counters = DeviceMemory(torch.device("cpu"), Allocator()).counters()  # type: ignore[arg-type]
    assert (counters.peak_requested_bytes, counters.peak_allocated_bytes, counters.peak_active_bytes) == (77, 77, None)
