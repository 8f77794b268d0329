"""The memory of one device: torch's counters on CUDA and the counting allocator on a CPU, under the same names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness.measure.allocation_logger import AllocationLogger, CpuAllocationLog, CudaAllocationLog
from harness.measure.native_allocator import Allocator


class MemoryCounters(NamedTuple):
    """The readings of a device's memory since reset_peak(); None means unknown, as most are on a CPU."""

    peak_allocated_bytes: int | None  # the most bytes allocated to tensors at once
    # The most that tensors requested at once, without the allocator's rounding, and with libraries' workspaces from
    # torch's allocator. On a CPU these are those that were allocated.
    peak_requested_bytes: int | None
    # The most in blocks that could not be used anew: allocated, or freed and still awaited by another stream, as after
    # a collective.
    peak_active_bytes: int | None = None
    peak_reserved_bytes: int | None = None  # the most that the caching allocator reserved
    # Those in use on the device that are not torch's: contexts, libraries' workspaces, NCCL's buffers, other processes.
    non_torch_bytes: int | None = None
    num_alloc_retries: int | None = None  # how often the cache was emptied to serve a request, which costs throughput
    num_ooms: int | None = None  # how often a request failed because memory ran out


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of this process on its device, and the limit on it. None means unknown, as on a CPU without allocator.

    On a CPU the limit is on the bytes that tensors request, which are also what the peak counts. On CUDA it is on what
    torch's allocator reserves on the device, which releases its cache before it fails; the context and NCCL's buffers
    are not included.
    """

    device: torch.device
    allocator: Allocator | None = None  # for a CPU, or a simulated device; torch counts by itself on CUDA
    budget_bytes: int | None = None  # None is no limit

    def enforce_limit(self) -> None:
        """Make requests that would exceed the budget raise torch.OutOfMemoryError from now on.

        Raise RuntimeError on a CPU without the counting allocator.
        """
        self._set_limit(self.budget_bytes)

    def disable_limit(self) -> None:
        """Allow all requests from now on."""
        self._set_limit(None)

    @contextmanager
    def limit_suspended(self) -> Iterator[None]:
        """Lift the limit inside the block, for memory that the harness's own measurements need."""
        self.disable_limit()
        try:
            yield
        finally:
            self.enforce_limit()

    def _set_limit(self, limit_bytes: int | None) -> None:
        if self.budget_bytes is None:
            return
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
            torch.cuda.set_per_process_memory_fraction(share, self.device)
        elif self.allocator is None:
            raise RuntimeError("cluster.memory_budget cannot be enforced: the counting allocator is not loaded")
        else:
            self.allocator.set_limit(limit_bytes or 0)

    @property
    def counts_requests(self) -> bool:
        """True if the counters count bytes as requested; torch's allocator on CUDA counts blocks, rounded up."""
        return self.device.type != "cuda" or self.allocator is not None

    def reset_peak(self) -> None:
        """Start a new peak from the bytes allocated now, and count retries and failures anew."""
        if self.allocator is not None:
            self.allocator.reset_peak()
        elif self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            torch.cuda.reset_accumulated_memory_stats(self.device)

    def allocated_bytes(self) -> int | None:
        """Return the bytes allocated to tensors now."""
        if self.allocator is not None:
            return self.allocator.live_bytes()
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None

    def peak_allocated_bytes(self) -> int | None:
        """Return the most bytes allocated to tensors at once since reset_peak()."""
        if self.allocator is not None:
            return self.allocator.peak_bytes()
        if self.device.type != "cuda":
            return None
        # torch's max_memory_allocated() lists and sorts all readings first, which takes ten times as long.
        return int(torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["peak"])

    def counters(self) -> MemoryCounters:
        """Return all readings. Call this right after the last step."""
        allocated = self.peak_allocated_bytes()
        if self.counts_requests:
            return MemoryCounters(allocated, allocated)
        statistics = torch.cuda.memory_stats(self.device)  # of which cudaMallocAsync has fewer
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryCounters(
            allocated,
            statistics.get("requested_bytes.all.peak"),
            statistics.get("active_bytes.all.peak"),
            torch.cuda.max_memory_reserved(self.device),
            total - free - torch.cuda.memory_reserved(self.device),
            statistics.get("num_alloc_retries", 0),
            statistics.get("num_ooms", 0),
        )

    def empty_cache(self) -> None:
        """Release the caching allocator's unused memory, so that what was needed once does not stay reserved."""
        if not self.counts_requests:
            torch.cuda.empty_cache()

    def begin_log(self) -> AllocationLogger:
        """Log every allocation and free from now on, where that is possible.

        On CUDA that takes torch's own allocator: the one of PYTORCH_ALLOC_CONF=backend:cudaMallocAsync raises an
        error when it is asked for its history.
        """
        if self.allocator is not None:
            return CpuAllocationLog(self.allocator)
        if self.device.type == "cuda" and torch.cuda.memory.get_allocator_backend() == "native":
            return CudaAllocationLog(self.device)
        return AllocationLogger()
