"""Loggers of a device's allocations: the counting allocator's log on a CPU, torch's memory history on CUDA."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from harness.measure.allocation_log import AllocationLog, StepAnnotations
from harness.measure.memory_snapshot import Snapshot, snapshot_of_host
from harness.measure.native_allocator import Allocator

_SIGNS = {"alloc": 1, "free_requested": -1}  # actions in torch's history that change what is allocated


class AllocationLogger:
    """A logger that runs from its creation until end(); this one, where allocations cannot be logged, logs nothing."""

    is_complete = False  # whether, after end(), allocations and frees add up to the blocks that are live
    peak_bytes: int | None = None  # after end(): the peak outside pauses, where the allocator counts bytes as requested

    def position(self) -> int:
        """Return the moment of the next line."""
        return 0

    def pause(self, is_paused: bool) -> int:
        """Exclude the lines from now on from the peak, or include them; return the moment of the next line."""
        return self.position()

    def end(self) -> AllocationLog | None:
        """Stop logging and return the log."""
        return None

    def snapshot(self, annotations: StepAnnotations) -> Snapshot:
        """Return what was logged, for torch's viewer. Call end() first."""
        raise NotImplementedError


class CpuAllocationLog(AllocationLogger):
    """A logger of an allocator that counts requests; a moment is the number of a line."""

    is_complete = True

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.initial_count = allocator.begin_log()  # other threads may write lines from now on

    def position(self) -> int:
        """Return the number of the next line."""
        return self.allocator.log_length()

    def pause(self, is_paused: bool) -> int:
        """Exclude the lines from now on from the peak, or include them; return the number of the next line."""
        return self.allocator.pause_log(is_paused)

    def end(self) -> AllocationLog:
        """Stop logging and return the log."""
        self.peak_bytes = self.allocator.end_log()
        return self.read()

    def read(self) -> AllocationLog:
        """Return the log of an allocator that has stopped logging."""
        addresses, sizes, foreign = self.allocator.read_log().T
        self.log = AllocationLog(np.arange(len(addresses)), addresses, sizes, foreign, self.initial_count)
        return self.log

    def snapshot(self, annotations: StepAnnotations) -> Snapshot:
        """Return what was logged, for torch's viewer. Call end() first."""
        return snapshot_of_host(self.log, annotations)


class CudaAllocationLog(AllocationLogger):
    """A logger of torch's caching allocator; a moment is a microsecond, and sizes are those requested."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # No stack traces are kept; by default torch would still load its C++ unwinder.
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
        self.started = self.position()
        self.initial_blocks = self._live_blocks(torch.cuda.memory._snapshot(device))

    def _live_blocks(self, snapshot: Snapshot) -> list[tuple[int, int]]:
        """Return address and requested bytes of every block in use."""
        return [
            (block["address"], block["requested_size"])
            for segment in snapshot["segments"]
            if segment["device"] == self.device.index
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]

    def position(self) -> int:
        """Return the present time in microseconds."""
        return time.time_ns() // 1000

    def end(self) -> AllocationLog:
        """Stop logging and return the log."""
        self.final_snapshot: Snapshot = torch.cuda.memory._snapshot(self.device)
        history = self.final_snapshot["device_traces"][self.device.index]
        torch.cuda.memory._record_memory_history(None)
        lines = [(self.started, address, size) for address, size in self.initial_blocks]
        lines += [
            (entry["time_us"], entry["addr"], _SIGNS[entry["action"]] * entry["size"])
            for entry in history
            if entry["action"] in _SIGNS
        ]
        moments, addresses, sizes = np.array(lines, np.int64).reshape(-1, 3).T
        self.is_complete = sum(sizes) == sum(size for _, size in self._live_blocks(self.final_snapshot))
        return AllocationLog(moments, addresses, sizes, np.zeros_like(sizes), len(self.initial_blocks))

    def snapshot(self, annotations: StepAnnotations) -> Snapshot:
        """Return torch's own snapshot. Call end() first."""
        return self.final_snapshot


class PeakStepLog:
    """The log of the last one among several steps in which the peak rose; `allocator=None` logs nothing."""

    def __init__(self, allocator: Allocator | None) -> None:
        self.allocator = allocator
        self.peak_bytes = 0
        self.log: AllocationLog | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Log a step, and keep its log if the peak rose in it."""
        if self.allocator is None:
            yield
            return
        logger = CpuAllocationLog(self.allocator)
        yield
        peak_bytes = self.allocator.end_log()
        if peak_bytes > self.peak_bytes:
            self.peak_bytes, self.log = peak_bytes, logger.read()
