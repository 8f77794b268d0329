"""Memory of one device: torch's counters on CUDA, the counting allocator on a CPU, under the same names."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from harness.measure import memory_snapshot
from harness.measure.memory_attribution import AllocationLog, StepAnnotations
from harness.measure.memory_limit import NO_LIMIT, MemoryLimit
from harness.measure.native_allocator import Allocator

_FREED = {"alloc": 1, "free_requested": -1}  # lines of torch's history that change what is allocated


class MemoryCounters(NamedTuple):
    """What a device's memory was, as DeviceMemory's methods of these names say."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    outside_bytes: int | None
    allocation_retries: int | None
    out_of_memory_errors: int | None


@dataclass(frozen=True)
class DeviceMemory:
    """What this process holds on its device, in bytes. None is unknown: on a CPU without the allocator, everything."""

    device: torch.device
    allocator: Allocator | None = None  # of the CPU; not used on CUDA
    limit: MemoryLimit = NO_LIMIT

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def reset_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.allocator is not None:
            self.allocator.reset_peak()

    def allocated_bytes(self) -> int | None:
        """Held by tensors now."""
        if self._cuda:
            return torch.cuda.memory_allocated(self.device)
        return self.allocator.live_bytes() if self.allocator is not None else None

    def peak_allocated_bytes(self) -> int | None:
        """The most held by tensors since reset_peak()."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return self.allocator.peak_bytes() if self.allocator is not None else None

    def peak_reserved_bytes(self) -> int | None:
        """The most the caching allocator took from the device since reset_peak(); a CPU has no such cache."""
        return torch.cuda.max_memory_reserved(self.device) if self._cuda else None

    def empty_cache(self) -> None:
        """Gives back what the caching allocator keeps for later, so that what was needed once is not reserved on."""
        if self._cuda:
            torch.cuda.empty_cache()

    def allocation_retries(self) -> int | None:
        """How often the cache was emptied to serve a request, since the start: above 0, throughput suffers."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)) if self._cuda else None

    def out_of_memory_errors(self) -> int | None:
        """How often a request failed, since the start."""
        return int(torch.cuda.memory_stats(self.device).get("num_ooms", 0)) if self._cuda else None

    def since(self, before: "MemoryCounters") -> "MemoryCounters":
        """Since reset_peak(), and since `before`; to be read when the steps are over and nothing else was done."""
        now = self.counters()
        return now._replace(
            allocation_retries=_since(before.allocation_retries, now.allocation_retries),
            out_of_memory_errors=_since(before.out_of_memory_errors, now.out_of_memory_errors),
        )

    def counters(self) -> "MemoryCounters":
        return MemoryCounters(
            self.peak_allocated_bytes(),
            self.peak_reserved_bytes(),
            self.outside_bytes(),
            self.allocation_retries(),
            self.out_of_memory_errors(),
        )

    def outside_bytes(self) -> int | None:
        """In use on the device and not torch's: contexts, libraries' workspaces, NCCL's buffers, other processes."""
        if not self._cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free) - torch.cuda.memory_reserved(self.device)

    def track_peak_step(self) -> "PeakStepLog":
        """Follows steps one by one and keeps the log of the fullest; not on CUDA, where that would slow them."""
        return PeakStepLog(None if self._cuda else self.allocator)

    @property
    def counts_requests(self) -> bool:
        """Whether what is counted is what was asked for; torch's allocator on CUDA counts blocks, rounded up."""
        return not self._cuda

    @property
    def can_log(self) -> bool:
        return self._cuda or self.allocator is not None

    def begin_log(self) -> "AllocationLogger":
        """From here on every block that comes or goes is written down. Raises RuntimeError where nothing counts."""
        if self._cuda:
            return CudaAllocationLog(self.device)
        if self.allocator is None:
            raise RuntimeError("no allocator counts this CPU's memory")
        return CpuAllocationLog(self.allocator)


class AllocationLogger:
    """The history of one device's blocks: `now` is the moment of the line that comes next, `end` closes it."""

    is_whole = True  # after end(): whether what came and went leaves what is there

    def now(self) -> int:
        raise NotImplementedError

    def end(self) -> AllocationLog:
        raise NotImplementedError

    def snapshot(self, notes: StepAnnotations) -> dict[str, Any]:
        """What was logged, for torch's viewer; after end()."""
        raise NotImplementedError


class CpuAllocationLog(AllocationLogger):
    """Of the counting allocator: a moment is the number of a line."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        allocator.begin_log()
        self.standing = allocator.log_length()

    def now(self) -> int:
        return self.allocator.log_length()

    def end(self) -> AllocationLog:
        addresses, sizes, foreign = self.allocator.end_log().T
        self.log = AllocationLog(np.arange(len(addresses)), addresses, sizes, foreign, self.standing)
        return self.log

    def snapshot(self, notes: StepAnnotations) -> dict[str, Any]:
        return memory_snapshot.snapshot_of_host(self.log, notes)


class PeakStepLog:
    """The log of the step in which the peak rose last."""

    def __init__(self, allocator: Allocator | None) -> None:
        self.allocator = allocator
        self.peak_bytes = 0
        self.log: AllocationLog | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        if self.allocator is None:
            yield
            return
        history = CpuAllocationLog(self.allocator)
        yield
        peak_bytes = self.allocator.peak_bytes()
        if peak_bytes > self.peak_bytes:
            self.peak_bytes, self.log = peak_bytes, history.end()
        else:
            self.allocator.drop_log()


class CudaAllocationLog(AllocationLogger):
    """torch's own history of its caching allocator; a moment is a microsecond. Sizes are those requested."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.memory._record_memory_history("all", context=None)
        self.begun = self.now()
        self.there = self._allocated(torch.cuda.memory._snapshot(device))

    def _allocated(self, snapshot: dict[str, Any]) -> list[tuple[int, int]]:
        """Address and requested bytes of every block in use."""
        return [
            (block["address"], block["requested_size"])
            for segment in snapshot["segments"]
            if segment["device"] == self.device.index
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]

    def now(self) -> int:
        return time.time_ns() // 1000

    def end(self) -> AllocationLog:
        self.taken: dict[str, Any] = torch.cuda.memory._snapshot(self.device)
        history: list[dict[str, Any]] = self.taken["device_traces"][self.device.index]
        torch.cuda.memory._record_memory_history(None)
        lines = [(self.begun, address, size) for address, size in self.there]
        for entry in history:
            if entry["action"] in _FREED:
                lines.append((entry["time_us"], entry["addr"], _FREED[entry["action"]] * entry["size"]))
        moments, addresses, sizes = np.array(lines, np.int64).reshape(-1, 3).T
        self.is_whole = sum(sizes) == sum(size for _, size in self._allocated(self.taken))
        return AllocationLog(moments, addresses, sizes, np.zeros_like(sizes), len(self.there))

    def snapshot(self, notes: StepAnnotations) -> dict[str, Any]:
        return self.taken


def _since(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before
