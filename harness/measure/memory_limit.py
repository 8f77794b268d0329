"""The memory budget of one rank, enforced by the allocator that counts its memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from harness.measure.native_allocator import Allocator

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
    allocator: Allocator | None = None  # for a CPU; not used on CUDA

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
            self.allocator.set_limit(limit_bytes)


NO_LIMIT = MemoryLimit()
