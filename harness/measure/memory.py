"""The memory of one device: torch's counters on CUDA and the counting allocator on a CPU, under the same names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness.measure.allocation_logger import AllocationLogger, CpuAllocationLog, CudaAllocationLog, PeakStepLog
from harness.measure.native_allocator import Allocator, LimitedAllocator

CPU = torch.device("cpu")


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory that this process may allocate on its device; `budget_bytes=None` means no limit.

    On a CPU it limits the bytes that tensors request, which are also what the peak counts. On CUDA it limits what
    torch's allocator reserves on the device, which releases its cache before it fails; the context and NCCL's buffers
    are not included.
    """

    budget_bytes: int | None = None
    device: torch.device = CPU
    allocator: LimitedAllocator | None = None  # for a CPU; not used on CUDA

    def enforce(self) -> None:
        """Make requests that would exceed the budget raise torch.OutOfMemoryError from now on.

        Raise RuntimeError on a CPU without the counting allocator.
        """
        if self.budget_bytes is not None:
            self._set(self.budget_bytes)

    def disable(self) -> None:
        """Allow all requests from now on."""
        if self.budget_bytes is not None:
            self._set(None)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Lift the limit inside the block, for memory that the harness's own measurements need."""
        self.disable()
        try:
            yield
        finally:
            self.enforce()

    def _set(self, limit_bytes: int | None) -> None:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
            torch.cuda.set_per_process_memory_fraction(share, self.device)
        elif self.allocator is None:
            raise RuntimeError("cluster.memory_budget cannot be enforced: the counting allocator is not loaded")
        else:
            self.allocator.set_limit(limit_bytes or 0)


NO_LIMIT = MemoryLimit()


class MemoryCounters(NamedTuple):
    """The readings of a device's memory, defined by DeviceMemory's methods of the same names."""

    peak_allocated_bytes: int | None
    peak_requested_bytes: int | None
    peak_active_bytes: int | None
    peak_reserved_bytes: int | None
    non_torch_bytes: int | None
    num_alloc_retries: int | None
    num_ooms: int | None


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of this process on its device. None means unknown, as all is on a CPU without the allocator."""

    device: torch.device
    allocator: Allocator | None = None  # for a CPU, or a simulated device; torch counts by itself on CUDA
    limit: MemoryLimit = NO_LIMIT

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda" and self.allocator is None

    def reset_peak(self) -> None:
        """Start a new peak from the bytes allocated now."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.allocator is not None:
            self.allocator.reset_peak()

    def allocated_bytes(self) -> int | None:
        """Return the bytes allocated to tensors now."""
        if self._cuda:
            return torch.cuda.memory_allocated(self.device)
        return self.allocator.live_bytes() if self.allocator is not None else None

    def peak_allocated_bytes(self) -> int | None:
        """Return the most bytes allocated to tensors at once since reset_peak()."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return self.allocator.peak_bytes() if self.allocator is not None else None

    def peak_requested_bytes(self) -> int | None:
        """Return the most bytes that tensors requested at once since reset_peak(), without the allocator's rounding.

        On a CPU that is peak_allocated_bytes(). Libraries' workspaces from torch's allocator are included.
        """
        return self._peak_of("requested_bytes") if self._cuda else self.peak_allocated_bytes()

    def peak_active_bytes(self) -> int | None:
        """Return the most bytes in blocks that could not be used anew since reset_peak(); a CPU has no such blocks.

        They are allocated, or freed and still awaited by another stream, as after a collective.
        """
        return self._peak_of("active_bytes") if self._cuda else None

    def _peak_of(self, statistic: str) -> int | None:
        """Return the peak of one of torch's statistics since reset_peak(); None where the allocator has none."""
        peak = torch.cuda.memory_stats(self.device).get(f"{statistic}.all.peak")
        return None if peak is None else int(peak)

    def peak_reserved_bytes(self) -> int | None:
        """Return the most bytes that the caching allocator reserved since reset_peak(); a CPU has no such cache."""
        return torch.cuda.max_memory_reserved(self.device) if self._cuda else None

    def empty_cache(self) -> None:
        """Release the caching allocator's unused memory, so that what was needed once does not stay reserved."""
        if self._cuda:
            torch.cuda.empty_cache()

    def num_alloc_retries(self) -> int | None:
        """Return how often since the start the cache was emptied to serve a request, which costs throughput."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)) if self._cuda else None

    def num_ooms(self) -> int | None:
        """Return how often since the start a request failed because memory ran out."""
        return int(torch.cuda.memory_stats(self.device).get("num_ooms", 0)) if self._cuda else None

    def since(self, before: MemoryCounters) -> MemoryCounters:
        """Return peaks since reset_peak() and counts since `before`. Call this right after the last step."""
        after = self.counters()
        return after._replace(
            num_alloc_retries=_difference(before.num_alloc_retries, after.num_alloc_retries),
            num_ooms=_difference(before.num_ooms, after.num_ooms),
        )

    def counters(self) -> MemoryCounters:
        """Return all readings."""
        return MemoryCounters(*(getattr(self, name)() for name in MemoryCounters._fields))

    def non_torch_bytes(self) -> int | None:
        """Return the bytes in use on the device that are not torch's.

        These are contexts, libraries' workspaces, NCCL's buffers and other processes.
        """
        if not self._cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free) - torch.cuda.memory_reserved(self.device)

    def track_peak_step(self) -> PeakStepLog:
        """Return a log of the step with the highest peak; it logs nothing on CUDA, where that would slow the steps."""
        return PeakStepLog(self.allocator)

    @property
    def counts_requests(self) -> bool:
        """True if the counters count bytes as requested; torch's allocator on CUDA counts blocks, rounded up."""
        return not self._cuda

    @property
    def can_log(self) -> bool:
        """True if allocations can be logged.

        On CUDA that takes torch's own allocator: the one of PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync raises an
        error when it is asked for its history.
        """
        if self._cuda:
            return torch.cuda.memory.get_allocator_backend() == "native"
        return self.allocator is not None

    def begin_log(self) -> AllocationLogger:
        """Log every allocation and free from now on. Raise RuntimeError on a CPU without the counting allocator."""
        if self._cuda:
            return CudaAllocationLog(self.device)
        if self.allocator is None:
            raise RuntimeError("the counting allocator is not loaded")
        return CpuAllocationLog(self.allocator)


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
