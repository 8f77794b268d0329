"""A history of CUDA's caching allocator in torch's format, without a device.

The format is that of torch.cuda.memory._snapshot (its docstring lists the actions and states): sizes of blocks are
rounded up, those of requests are not; a block that other streams still use is freed in two steps; an `oom` entry has
`device_free` where others have an address; expandable segments are mapped and unmapped.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

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


@contextmanager
def memory_history(allocator: AllocatorHistory) -> Iterator[None]:
    """Return a context in which torch's memory history is this allocator's."""
    module = torch.cuda.memory
    with (
        mock.patch.object(module, "_record_memory_history", allocator.record_memory_history),
        mock.patch.object(module, "_snapshot", allocator.snapshot),
    ):
        yield
