"""The memory of a simulated device: its log, and the peaks that the caching allocator would reach."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from harness.measure.allocation_log import AllocationLog, OpSpan
from harness.measure.allocation_logger import AllocationLogger
from harness.measure.memory import DeviceMemory
from harness.simulator.caching_allocator import AllocatorPeaks, CachingAllocator, OutOfDeviceMemoryError
from harness.simulator.fake_memory import Request, StorageCounter


class SimulatedAllocationLog(AllocationLogger):
    """A logger of the storages of fake tensors; a moment is the number of a request."""

    def __init__(self, counter: StorageCounter) -> None:
        self.counter = counter
        self.initial_blocks = list(counter.sizes.items())
        self.started = self.position()

    def position(self) -> int:
        """Return the number of the next request."""
        return len(self.counter.requests)

    def end(self) -> AllocationLog:
        """Return the log."""
        lines = [(self.started - 1, identity, size) for identity, size in self.initial_blocks]
        for number, request in enumerate(self.counter.requests[self.started :], start=self.started):
            lines.append((number, request.identity, request.bytes))
        moments, identities, sizes = np.array(lines, np.int64).reshape(-1, 3).T
        return AllocationLog(moments, identities, sizes, np.zeros_like(sizes), len(self.initial_blocks))


@dataclass(frozen=True)
class SimulatedMemory(DeviceMemory):
    """The memory of a device that fake tensors would take, in bytes as they request it."""

    counter: StorageCounter = dataclasses.field(kw_only=True)

    @property
    def _cuda(self) -> bool:
        return False  # torch has no counters of a simulated device

    def reset_peak(self) -> None:
        """Start a new peak from the bytes that are live now."""
        self.counter.reset_peak()

    def allocated_bytes(self) -> int:
        """Return the bytes of the storages that live now."""
        return self.counter.live_bytes

    def peak_allocated_bytes(self) -> int:
        """Return the most bytes that lived at once since reset_peak()."""
        return self.counter.peak_bytes

    @property
    def can_log(self) -> bool:
        """True, as every storage is logged."""
        return True

    def begin_log(self) -> AllocationLogger:
        """Log every storage from now on."""
        return SimulatedAllocationLog(self.counter)


def replay(
    requests: Iterable[Request], allocator: CachingAllocator, pauses: Iterable[OpSpan], peaks_from: int
) -> AllocatorPeaks:
    """Return the peaks that an allocator reaches by requests from the number `peaks_from` on.

    What a measurement allocated in pauses, which are spans of requests, is left out. Raises OutOfDeviceMemoryError,
    with the number of the request, if memory runs out.
    """
    paused = iter(sorted(pauses))
    pause = next(paused, None)
    addresses: dict[int, int] = {}
    for number, request in enumerate(requests):
        if number == peaks_from:
            allocator.reset_peaks()
        while pause is not None and number >= pause.end:
            pause = next(paused, None)
        is_paused = pause is not None and number >= pause.start
        if request.bytes < 0 and request.identity in addresses:
            allocator.free(addresses.pop(request.identity))
        elif request.bytes > 0 and not is_paused:
            try:
                addresses[request.identity] = allocator.allocate(request.bytes, request.stream)
            except OutOfDeviceMemoryError as error:
                error.moment = number
                raise
    return allocator.peaks
