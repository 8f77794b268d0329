"""Blocks of CUDA's caching allocator, the pools in which the free ones wait, and the settings that change sizes."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from harness.util.text import UserError

MIB = 2**20

SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size: of blocks below kMinLargeAlloc

PLACE = attrgetter("place")


@dataclass(eq=False)
class MemoryBlock:
    """A part of a segment, allocated or free; `previous` and `next` are its neighbors in the segment."""

    address: int
    size: int
    stream: int
    pool: Pool
    is_expandable: bool = False
    is_mapped: bool = True  # False for address space of an expandable segment without memory
    is_allocated: bool = False
    requested_bytes: int = 0
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None
    cached_since: int = 0  # the pool's count of searches when the block was freed

    @property
    def place(self) -> tuple[bool, int, int, int]:
        """The place of a free or unmapped block in its pool, which is searched by size, or else by address."""
        return self.is_mapped, self.stream, self.size if self.is_mapped else 0, self.address

    @property
    def expandable_size(self) -> int:
        """The bytes to which a free block can grow without moving."""
        after = self.next
        return self.size + (after.size if after is not None and not after.is_mapped else 0)

    @property
    def is_split(self) -> bool:
        """Whether the block is a part of its segment only."""
        return self.previous is not None or self.next is not None

    def split(self, size: int) -> MemoryBlock:
        """Keep the first bytes, and return a block of the rest; neither is in a pool."""
        address, rest_size = self.address + size, self.size - size
        rest = MemoryBlock(address, rest_size, self.stream, self.pool, self.is_expandable, self.is_mapped)
        self.size = size
        _connect(rest, self.next)
        _connect(self, rest)
        return rest

    def settle(self) -> None:
        """Enter the pool, together with neighbors that are in it and mapped as this block is (try_merge_blocks)."""
        for neighbor in (self.previous, self.next):
            if neighbor is None or neighbor.is_allocated or neighbor.is_mapped != self.is_mapped:
                continue
            self.pool.remove(neighbor)
            first, last = (neighbor, self) if neighbor is self.previous else (self, neighbor)
            self.address, self.size = first.address, first.size + last.size
            before, after = first.previous, last.next
            _connect(before, self)
            _connect(self, after)
        self.pool.insert(self)


def _connect(before: MemoryBlock | None, after: MemoryBlock | None) -> None:
    """Make two blocks neighbors; None is an end of the segment."""
    if before is not None:
        before.next = after
    if after is not None:
        after.previous = before


@dataclass(eq=False)
class Pool:
    """The free and unmapped blocks of small or of large segments, in the order in which they are searched."""

    segment_bytes: int  # of a new segment; what expandable segments map is a multiple of it
    blocks: list[MemoryBlock] = field(default_factory=list)
    searches: int = 0

    def insert(self, block: MemoryBlock) -> None:
        """Add a free or unmapped block."""
        block.cached_since = self.searches
        insort(self.blocks, block, key=PLACE)

    def remove(self, block: MemoryBlock) -> None:
        """Take out a free or unmapped block."""
        del self.blocks[bisect_left(self.blocks, block.place, key=PLACE)]

    def of_stream(self, stream: int, is_mapped: bool = True, least_bytes: float = 0) -> list[MemoryBlock]:
        """Return the free or the unmapped blocks of a stream; free ones have so many bytes at least."""
        keys = ((is_mapped, stream, least_bytes), (is_mapped, stream + 1))
        start, stop = (bisect_left(self.blocks, key, key=PLACE) for key in keys)
        return self.blocks[start:stop]


# What torch's allocator has further settings for, which change no sizes: backends, pinned memory, locks, traces.
IGNORED = ("backend", "pinned_", "release_lock_", "graph_capture_", "throw_on_", "per_process_memory_fraction")


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of PYTORCH_ALLOC_CONF that change sizes, by the names of torch's documentation."""

    expandable_segments: bool = False
    max_split_size_mb: float = math.inf  # free blocks of at least this size are not split
    max_non_split_rounding_mb: int = 20  # how much larger than a request an unsplit block may be
    roundup_power2_divisions: int = 0  # 0 and 1 round to multiples of 512 bytes
    garbage_collection_threshold: float = 0.0  # of the memory limit; 0 collects nothing


# How the value of each setting is read.
READERS: dict[str, Callable[[str], Any]] = {
    "expandable_segments": {"True": True, "true": True, "False": False, "false": False}.__getitem__,
    "max_split_size_mb": int,
    "max_non_split_rounding_mb": int,
    "roundup_power2_divisions": int,
    "garbage_collection_threshold": float,
}


def parse_allocator_settings(text: str) -> AllocatorSettings:
    """Return the settings of a value of PYTORCH_ALLOC_CONF, or of its older name PYTORCH_CUDA_ALLOC_CONF.

    Raises UserError if a setting is unknown, or if rounding differs by size, which is not modeled.
    """
    values: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition(":"))
        try:
            if not name.startswith(IGNORED):
                values[name] = READERS[name](value)
        except (KeyError, ValueError):
            raise UserError(
                f"PYTORCH_ALLOC_CONF={text}: the model of the allocator does not know {part}; leave it out"
            ) from None
    return AllocatorSettings(**values)
