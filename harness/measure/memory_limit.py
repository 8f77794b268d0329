"""The budget of one rank's memory, held to where that memory is counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from harness.measure.native_allocator import Allocator

CPU = torch.device("cpu")


@dataclass(frozen=True)
class MemoryLimit:
    """What this process may hold on its device while that is enforced; None: whatever there is.

    On a CPU it is of the bytes that tensors ask for, which is what the peak counts. On CUDA it is of what torch's
    allocator takes from the device, which it gives back before it fails; a context and NCCL's buffers are no part.
    """

    budget_bytes: int | None = None
    device: torch.device = CPU
    allocator: Allocator | None = None  # of the CPU; not used on CUDA

    def enforce(self) -> None:
        """From here on the request that would exceed the budget is a torch.OutOfMemoryError.

        Raises RuntimeError where nothing counts and so nothing can refuse.
        """
        if self.budget_bytes is not None:
            self._set(self.budget_bytes)

    def disable(self) -> None:
        if self.budget_bytes is not None:
            self._set(None)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """For what the harness itself holds to look at a run; the budget is the run's."""
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
            raise RuntimeError("no allocator counts this CPU's memory, so that none can be refused")
        else:
            self.allocator.set_limit(limit_bytes)


NO_LIMIT = MemoryLimit()
