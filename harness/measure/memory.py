"""Memory of one device: torch's counters on CUDA, the counting allocator on a CPU, under the same names."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.measure.native import Allocator


@dataclass(frozen=True)
class DeviceMemory:
    """What this process holds on its device, in bytes. None is unknown: on a CPU without the allocator, everything."""

    device: torch.device
    allocator: Allocator | None = None  # of the CPU; not used on CUDA

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

    def allocation_retries(self) -> int | None:
        """How often the cache was emptied to serve a request, since the start: above 0, throughput suffers."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)) if self._cuda else None

    def out_of_memory_errors(self) -> int | None:
        """How often a request failed, since the start."""
        return int(torch.cuda.memory_stats(self.device).get("num_ooms", 0)) if self._cuda else None


def local_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's data on this rank: of a DTensor its local one, of a plain one itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a DTensor names its mesh too
            yield from local_tensors(part)


def storages(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Identity and size in bytes of every storage behind a tensor; an identity lasts as long as its storage."""
    for local in local_tensors(tensor):
        if local.device.type != "meta" and local.layout == torch.strided:
            storage = local.untyped_storage()
            yield storage._cdata, storage.nbytes()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors on this rank, padding included; freed ones count 0."""
    return sum({identity: size for tensor in tensors for identity, size in storages(tensor)}.values())


def element_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' own elements on this rank, each view once, not the buffers that they lie in."""
    found = {
        (local.untyped_storage()._cdata, local.storage_offset(), local.numel()): local.numel() * local.element_size()
        for tensor in tensors
        for local in local_tensors(tensor)
    }
    return sum(found.values())
