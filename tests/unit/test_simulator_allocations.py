"""The log of CUDA's caching allocator, read from histories in torch's format: what is allocated, and until when.

The format is that of torch.cuda.memory._snapshot (its docstring lists the actions and states): sizes of blocks are
rounded up, those of requests are not; a block that other streams still use is freed in two steps; an `oom` entry has
`device_free` where others have an address; expandable segments are mapped and unmapped.
"""

import sys
import time
from typing import Any

import pytest
import torch

from harness.measure.allocation_log import StepAnnotations
from harness.measure.allocation_logger import CudaAllocationLog
from harness.measure.memory import DeviceMemory
from harness.measure.memory_attribution import attribute_peak

ALIGNMENT_BYTES = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp

SEGMENT_BYTES = 20 << 20  # kLargeBuffer; every block has a segment of its own here

BLOCK_STATES = {"alloc": "active_allocated", "free_requested": "active_pending_free"}

HistoryEntry = dict[str, Any]


class AllocatorHistory:
    """A caching allocator of one device with a segment for every block, which writes a history while it is enabled."""

    def __init__(self, device_index: int = 0) -> None:
        self.device_index = device_index
        self.entries: list[HistoryEntry] = []
        self.is_recording = False
        self.blocks: dict[int, dict[str, Any]] = {}  # by address: requested bytes and state
        self.next_address = 0x7F0000000000

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate a block of so many bytes in a new segment, and return its address."""
        address = self.next_address
        self.next_address += SEGMENT_BYTES
        self._record("segment_map", address, SEGMENT_BYTES, stream)
        self._record("alloc", address, size, stream)
        self.blocks[address] = {"requested_size": size, "state": BLOCK_STATES["alloc"], "stream": stream}
        return address

    def request_free(self, address: int) -> None:
        """Free a block that another stream may still use: it is no tensor's any more, and cannot be reused yet."""
        block = self.blocks[address]
        block["state"] = BLOCK_STATES["free_requested"]
        self._record("free_requested", address, block["requested_size"], block["stream"])

    def complete_free(self, address: int) -> None:
        """Make a block reusable, and unmap its segment."""
        block = self.blocks.pop(address)
        self._record("free_completed", address, block["requested_size"], block["stream"])
        self._record("segment_unmap", address, SEGMENT_BYTES, block["stream"])

    def free(self, address: int) -> None:
        """Free a block that no other stream uses."""
        self.request_free(address)
        self.complete_free(address)

    def run_out_of_memory(self, size: int) -> None:
        """Record a request that fails."""
        self._append({"action": "oom", "size": size, "stream": 0, "device_free": 1 << 20})

    def _record(self, action: str, address: int, size: int, stream: int) -> None:
        self._append({"action": action, "addr": address, "size": size, "stream": stream})

    def _append(self, entry: HistoryEntry) -> None:
        if self.is_recording:
            self.entries.append(entry | {"time_us": time.time_ns() // 1000, "frames": []})

    def record_memory_history(self, enabled: str | None = "all", **_: Any) -> None:
        """Start a history, or stop it with None, as torch.cuda.memory._record_memory_history does."""
        self.is_recording = enabled is not None
        if self.is_recording:
            self.entries.clear()

    def snapshot(self, device: object = None, **_: Any) -> dict[str, Any]:
        """Return what torch.cuda.memory._snapshot returns: the segments of all devices, and a history for each."""
        segments = [
            {
                "device": self.device_index,
                "address": address,
                "total_size": SEGMENT_BYTES,
                "blocks": [
                    {
                        "address": address,
                        "size": -(-block["requested_size"] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,
                        "requested_size": block["requested_size"],
                        "state": block["state"],
                    }
                ],
            }
            for address, block in self.blocks.items()
        ]
        traces: list[list[HistoryEntry]] = [[] for _ in range(self.device_index)]
        traces.append([*self.entries])
        return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


DEVICE_INDEX = 1  # of two devices, the first of which has a history without entries


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> AllocatorHistory:
    """Return an allocator whose history is torch's memory history."""
    allocator = AllocatorHistory(DEVICE_INDEX)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", allocator.record_memory_history)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocator.snapshot)
    return allocator


def begin_log() -> CudaAllocationLog:
    return CudaAllocationLog(torch.device("cuda", DEVICE_INDEX))


def peak_parts(log: CudaAllocationLog, annotations: StepAnnotations) -> dict[str, int]:
    """Return the bytes at the peak by role, and the sum of all."""
    lines = log.end()
    peak = attribute_peak(lines, annotations, lines)
    assert peak is not None
    return {part.role: part.bytes for part in peak.parts} | {"all": peak.bytes}


def test_a_block_is_freed_when_its_tensor_is_and_not_when_other_streams_are_done(allocator: AllocatorHistory) -> None:
    """A send's buffer is still in use by the stream of NCCL when the next tensor of a step is allocated."""
    parameter = allocator.allocate(1000)
    log = begin_log()
    annotations = StepAnnotations()
    annotations.claim(log.position(), [parameter], "parameter", "at rest")
    sent = allocator.allocate(700, stream=7)
    allocator.request_free(sent)
    other = allocator.allocate(500)
    allocator.complete_free(sent)
    allocator.free(other)
    parts = peak_parts(log, annotations)
    assert parts == {"parameter": 1000, "temporary": 700, "all": 1700}
    assert log.is_complete


def test_a_block_that_waits_for_another_stream_is_live_neither_before_nor_after(allocator: AllocatorHistory) -> None:
    waiting = allocator.allocate(300)
    allocator.request_free(waiting)
    log = begin_log()
    stays = allocator.allocate(64)
    allocator.complete_free(waiting)
    last = allocator.allocate(32)
    allocator.request_free(last)
    lines = log.end()
    assert lines.initial_count == 0
    assert lines.bytes.tolist() == [64, 32, -32]
    assert lines.addresses.tolist() == [stays, last, last]
    assert log.is_complete


def test_segments_and_failed_requests_are_no_blocks(allocator: AllocatorHistory) -> None:
    log = begin_log()
    block = allocator.allocate(10)
    allocator.run_out_of_memory(1 << 40)
    allocator.free(block)
    assert {entry["action"] for entry in allocator.entries} >= {"segment_map", "segment_unmap", "oom"}
    assert log.end().bytes.tolist() == [10, -10]
    assert max(abs(size) for size in log.end().bytes.tolist()) < SEGMENT_BYTES
    assert log.is_complete


def test_a_history_that_lost_entries_is_not_complete(allocator: AllocatorHistory) -> None:
    """The history has max_entries at most in torch, which drops the oldest."""
    log = begin_log()
    allocator.allocate(10)
    allocator.allocate(20)
    del allocator.entries[:2]
    log.end()
    assert not log.is_complete


DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("backend", "requested"), [("native", {"context": None, "stacks": "python"}), ("cudaMallocAsync", {})]
)
def test_only_torchs_own_allocator_has_a_history(
    monkeypatch: pytest.MonkeyPatch, backend: str, requested: dict[str, Any]
) -> None:
    """With stacks='all', its default, torch's C++ code loads an unwinder even where no stack is kept."""
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    options: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **named: options.update(named))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"segments": [], "device_traces": [[]]})
    logger = DeviceMemory(DEVICE).begin_log()
    assert options == requested and isinstance(logger, CudaAllocationLog) is bool(requested)


def test_peaks_of_requests_and_of_waiting_blocks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever releases memory to another stream must wait for it: an allocated peak alone would leave that out."""
    statistics = {"requested_bytes.all.peak": 90, "active_bytes.all.peak": 140, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    nested = {"allocated_bytes": {"all": {"peak": 100}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: nested)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    counters = DeviceMemory(DEVICE).counters()
    peaks = (counters.peak_requested_bytes, counters.peak_allocated_bytes, counters.peak_active_bytes)
    assert peaks == (90, 100, 140) and counters.non_torch_bytes == 100
    statistics.clear()  # cudaMallocAsync has fewer statistics
    assert DeviceMemory(DEVICE).counters().peak_requested_bytes is None


def test_the_peak_is_read_without_listing_all_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiled step reads it for every operator that may allocate, of which a large step has 100,000."""
    sizes = {"small_pool": 30, "large_pool": 70, "all": 100}
    reading = {pool: dict.fromkeys(("current", "peak", "allocated", "freed"), size) for pool, size in sizes.items()}
    names = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes")
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda _: dict.fromkeys(names, reading), raising=False)
    calls: list[str] = []
    memory = DeviceMemory(DEVICE)
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        peak = memory.peak_allocated_bytes()
    finally:
        sys.setprofile(None)
    assert peak == torch.cuda.max_memory_allocated(DEVICE) == 100
    assert len(calls) <= 10, calls


def test_a_cpu_counts_requests() -> None:
    class Allocator:
        def peak_bytes(self) -> int:
            return 77

    counters = DeviceMemory(torch.device("cpu"), Allocator()).counters()  # type: ignore[arg-type]
    assert (counters.peak_requested_bytes, counters.peak_allocated_bytes, counters.peak_active_bytes) == (77, 77, None)
