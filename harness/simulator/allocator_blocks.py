"""Blocks of CUDA's caching allocator, and the pools in which the free ones wait."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.util.errors import UserError

SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * 2**20  # large_segment_size: of blocks below kMinLargeAlloc


@dataclass(eq=False)
class MemoryBlock:
    """A part of a segment, allocated or free; `previous` and `next` are its neighbors in the segment."""

    address: int
    size: int
    stream: int
    pool: Pool
    requested_bytes: int = 0
    is_allocated: bool = False
    is_mapped: bool = True  # False for address space of an expandable segment without memory
    is_expandable: bool = False
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None
    cached_since: int = 0  # the pool's count of searches when the block was freed

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
        start, size_after = self.address + size, self.size - size
        rest = MemoryBlock(start, size_after, self.stream, self.pool, is_expandable=self.is_expandable)
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def merge(self, neighbor: MemoryBlock | None) -> None:
        """Take over a neighbor that is in the pool, if it is as this block, which is not (try_merge_blocks)."""
        if neighbor is None or neighbor.is_allocated or neighbor.is_mapped != self.is_mapped:
            return
        self.pool.remove(neighbor)
        if neighbor is self.previous:
            self.address, self.previous = neighbor.address, neighbor.previous
            if self.previous is not None:
                self.previous.next = self
        else:
            self.next = neighbor.next
            if self.next is not None:
                self.next.previous = self
        self.size += neighbor.size


@dataclass(eq=False)
class Pool:
    """The free blocks of small or of large segments, in the order in which they are searched."""

    is_small: bool
    free: list[tuple[int, int, int]] = field(default_factory=list)  # (stream, size, address)
    unmapped: list[tuple[int, int]] = field(default_factory=list)  # (stream, address)
    blocks: dict[int, MemoryBlock] = field(default_factory=dict)  # free and unmapped ones by address
    searches: int = 0

    @property
    def page_bytes(self) -> int:
        """The bytes that expandable segments map at once."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def insert(self, block: MemoryBlock) -> None:
        """Add a free or unmapped block."""
        self.blocks[block.address] = block
        if block.is_mapped:
            block.cached_since = self.searches
            insort(self.free, (block.stream, block.size, block.address))
        else:
            insort(self.unmapped, (block.stream, block.address))

    def remove(self, block: MemoryBlock) -> None:
        """Take out a free or unmapped block."""
        del self.blocks[block.address]
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]


@dataclass
class DeviceReservation:
    """What an allocator has of a device: bytes of segments, and addresses, which it never uses twice."""

    capacity_bytes: int  # of the device
    limit_bytes: int | None = None  # of the process; None is the device's
    reserved_bytes: int = 0
    peak_bytes: int = 0
    next_address: int = LARGE_SEGMENT_BYTES

    @property
    def most_bytes(self) -> int:
        """The bytes that the process may reserve."""
        return self.capacity_bytes if self.limit_bytes is None else min(self.capacity_bytes, self.limit_bytes)

    def reserve(self, size: int) -> bool:
        """Reserve bytes, and return whether there were so many."""
        if self.reserved_bytes + size > self.most_bytes:
            return False
        self.reserved_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return True

    def release(self, size: int) -> None:
        """Give bytes back."""
        self.reserved_bytes -= size

    def new_addresses(self, size: int) -> int:
        """Return the first of so many addresses that were not used before."""
        address = self.next_address
        self.next_address += -(-size // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        return address


MIB = 2**20

# What torch's allocator has further settings for, which change no sizes: backends, pinned memory, locks, traces.
IGNORED = ("backend", "pinned_", "release_lock_", "graph_capture_", "throw_on_", "per_process_memory_fraction")


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of PYTORCH_CUDA_ALLOC_CONF that change sizes, by the names of torch's documentation."""

    expandable_segments: bool = False
    max_split_bytes: float = math.inf  # max_split_size_mb: free blocks of at least this size are not split
    max_non_split_rounding_bytes: int = 20 * MIB  # how much larger than a request an unsplit block may be
    roundup_power2_divisions: int = 0  # 0 and 1 round to multiples of 512 bytes
    garbage_collection_threshold: float = 0.0  # of the memory limit; 0 collects nothing


# The field of each setting, and how its value is read.
SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": (
        "expandable_segments",
        {"True": True, "true": True, "False": False, "false": False}.__getitem__,
    ),
    "max_split_size_mb": ("max_split_bytes", lambda value: int(value) * MIB),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", lambda value: int(value) * MIB),
    "roundup_power2_divisions": ("roundup_power2_divisions", int),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
}


def parse_allocator_settings(text: str) -> AllocatorSettings:
    """Return the settings of a value of PYTORCH_CUDA_ALLOC_CONF.

    Raises UserError if a setting is unknown, or if rounding differs by size, which is not modeled.
    """
    values: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, _, value = (piece.strip() for piece in part.partition(":"))
        if name.startswith(IGNORED):
            continue
        try:
            field_name, read = SETTINGS[name]
            values[field_name] = read(value)
        except (KeyError, ValueError):
            raise UserError(
                f"PYTORCH_CUDA_ALLOC_CONF={text}: the model of the allocator does not know {part}; leave it out"
            ) from None
    return AllocatorSettings(**values)


def expand(device: DeviceReservation, pool: Pool, size: int, stream: int) -> MemoryBlock | None:
    """Return a block of an expandable segment, to which pages are mapped (try_allocate_expandable_block)."""
    block = _find_address_space(device, pool, size, stream)
    if not block.is_mapped and not _map(device, block, min(block.size, size)):
        return None
    while block.size < size:
        grown = block.next
        assert grown is not None  # _find_address_space saw address space after the block
        if not _map(device, grown, min(size - block.size, grown.size)):
            return None
        block = grown  # it has taken over the block before it
    pool.remove(block)
    return block


def _find_address_space(device: DeviceReservation, pool: Pool, size: int, stream: int) -> MemoryBlock:
    """Return the first free or unmapped block of the stream after which there is enough address space."""
    for _, address in pool.unmapped[bisect_left(pool.unmapped, (stream, 0)) :]:
        block = pool.blocks[address]
        if block.stream != stream:
            break
        if block.previous is not None and not block.previous.is_allocated:
            block = block.previous
        bytes_after, other = 0, block
        while other is not None and not other.is_allocated and bytes_after < size:
            bytes_after += other.size
            other = other.next  # type: ignore[assignment]
        if bytes_after >= size:
            return block
    # torch reserves 9/8 of the device's memory as addresses.
    page_bytes = pool.page_bytes
    space = -(-device.capacity_bytes * 9 // 8 // page_bytes) * page_bytes
    block = MemoryBlock(device.new_addresses(space), space, stream, pool, is_mapped=False, is_expandable=True)
    pool.insert(block)
    return block


def _map(device: DeviceReservation, block: MemoryBlock, size: int) -> bool:
    """Map whole pages at the start of an unmapped block; return whether there was memory for them (map_block)."""
    page_bytes = block.pool.page_bytes
    mapped = -(-size // page_bytes) * page_bytes
    if not device.reserve(mapped):
        return False
    block.pool.remove(block)
    block.is_mapped = True
    if mapped < block.size:
        rest = block.split(mapped)
        rest.is_mapped = False
        rest.pool.insert(rest)
    block.merge(block.previous)
    block.merge(block.next)
    block.pool.insert(block)
    return True


def unmap(device: DeviceReservation, block: MemoryBlock) -> None:
    """Give back the whole pages of a free block of an expandable segment (unmap_block)."""
    page_bytes = block.pool.page_bytes
    start = -(-block.address // page_bytes) * page_bytes
    end = (block.address + block.size) // page_bytes * page_bytes
    if start >= end:
        return
    block.pool.remove(block)
    if start > block.address:
        before, block = block, block.split(start - block.address)
        block.pool.insert(before)
    if block.address + block.size > end:
        rest = block.split(end - block.address)
        rest.pool.insert(rest)
    device.release(block.size)
    block.is_mapped = False
    block.merge(block.previous)
    block.merge(block.next)
    block.pool.insert(block)
