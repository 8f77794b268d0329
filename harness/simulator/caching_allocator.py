"""A model of CUDA's caching allocator: which segments it reserves for the blocks that a program allocates and frees.

It follows torch's c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13), whose functions the methods name. Left out
are private pools of CUDA graphs, peer access, blocks that wait for other streams, and the memory that other processes
and CUDA's context take.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean

from harness.simulator.allocator_blocks import (
    LARGE_SEGMENT_BYTES,
    MIB,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    MemoryBlock,
    Pool,
)
from harness.simulator.fake_memory import EMPTY_CACHE, Request
from harness.util.text import format_bytes

MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is a multiple of it
SMALL_BYTES = MIB  # kSmallSize: the largest block of the small pool
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from this size on a segment has the size of its first block
LARGE_ROUNDING_BYTES = 2 * MIB  # kRoundLarge


class OutOfDeviceMemoryError(Exception):
    """The device has no memory left for a block, even after all cached segments were given back."""

    moment = sys.maxsize  # the number of the request that could not be served, or the end


def round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of a unit that is not below a size."""
    return -(-size // unit) * unit


class CachingAllocator:
    """A caching allocator of one device; streams and addresses are integers."""

    def __init__(self, capacity_bytes: int, settings: AllocatorSettings, limit_bytes: int | None) -> None:
        """Model a device with so much memory for segments, and a limit by set_per_process_memory_fraction."""
        self.capacity_bytes, self.settings, self.limit_bytes = capacity_bytes, settings, limit_bytes
        self.most_bytes = capacity_bytes if limit_bytes is None else min(capacity_bytes, limit_bytes)
        self.readings = {"requested_bytes": 0, "allocated_bytes": 0, "reserved_bytes": 0}
        self.reset_peaks()
        self._next_address = LARGE_SEGMENT_BYTES  # no address is used twice
        self._small, self._large = Pool(SMALL_SEGMENT_BYTES), Pool(LARGE_SEGMENT_BYTES)
        self._active: dict[int, MemoryBlock] = {}  # allocated blocks by address

    def reset_peaks(self) -> None:
        """Start new peaks from the present readings."""
        self.peaks = dict(self.readings)

    def _count(self, **changes: int) -> None:
        """Change readings, and the peaks that they exceed."""
        for name, change in changes.items():
            self.readings[name] += change
            self.peaks[name] = max(self.peaks[name], self.readings[name])

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate a block of so many bytes for a stream and return its address (malloc).

        Raises OutOfDeviceMemoryError as torch does: after it has given back what it had cached.
        """
        rounded = self.round_size(size)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        block = self._find_free_block(pool, rounded, stream)
        remedies: tuple[Callable[[], object], ...]
        remedies = (self._collect_garbage, partial(self._release_oversized, pool, rounded, stream), self.empty_cache)
        for give_back in remedies:
            if block is None and give_back() is not False:  # else what was given back is too little
                block = self._reserve(pool, rounded, stream)
        if block is None:
            allocated, reserved = (format_bytes(self.readings[f"{kind}_bytes"]) for kind in ("allocated", "reserved"))
            raise OutOfDeviceMemoryError(
                f"{format_bytes(size)} do not fit beside {allocated} allocated and {reserved} reserved of the"
                f" {format_bytes(self.most_bytes)} that the process may reserve"
            )
        if self._should_split(block, rounded):
            pool.insert(block.split(rounded))
        block.is_allocated, block.requested_bytes = True, size
        self._active[block.address] = block
        self._count(allocated_bytes=block.size, requested_bytes=size)
        return block.address

    def free(self, address: int) -> None:
        """Free a block, merge it with free neighbors, and put it into its pool (free_block)."""
        block = self._active.pop(address)
        block.is_allocated = False
        self._count(allocated_bytes=-block.size, requested_bytes=-block.requested_bytes)
        block.settle()

    def empty_cache(self) -> None:
        """Give back segments and pages in which nothing is allocated (release_cached_blocks)."""
        for block in (*self._large.blocks, *self._small.blocks):
            if block.is_expandable:
                self._unmap(block)
            elif not block.is_split:
                self._release(block)

    def round_size(self, size: int) -> int:
        """Return the bytes of the block for a request."""
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and size > MIN_BLOCK_BYTES * divisions:
            power = 1 << (size.bit_length() - 1)
            return round_up(size, max(1, power >> (divisions.bit_length() - 1)))
        return max(MIN_BLOCK_BYTES, round_up(size, MIN_BLOCK_BYTES))

    def _find_free_block(self, pool: Pool, size: int, stream: int) -> MemoryBlock | None:
        """Return the smallest free block of the stream that is large enough, taken out of its pool (get_free_block)."""
        pool.searches += 1
        candidates = pool.of_stream(stream, least_bytes=size)
        if not candidates:
            return None
        block = candidates[0]
        for other in candidates[1:] if block.is_expandable else ():
            # An expandable segment counts with the size to which it can grow.
            if other.expandable_size >= block.expandable_size:
                break
            block = other
        most = self.settings.max_split_size_mb * MIB
        if size < most <= block.size:
            return None
        if size >= most and block.size >= size + self.settings.max_non_split_rounding_mb * MIB:
            return None
        pool.remove(block)
        return block

    def _should_split(self, block: MemoryBlock, size: int) -> bool:
        remaining = block.size - size
        if block.pool is self._small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        return size < self.settings.max_split_size_mb * MIB and remaining > SMALL_BYTES

    def _reserve(self, pool: Pool, size: int, stream: int) -> MemoryBlock | None:
        """Return a block of a new segment, or of an expandable one that grows; None without memory (alloc_block)."""
        if self.settings.expandable_segments:
            return self._expand(pool, size, stream)
        if size < MIN_LARGE_BYTES:
            size = pool.segment_bytes
        size = round_up(size, LARGE_ROUNDING_BYTES)
        return MemoryBlock(self._new_addresses(size), size, stream, pool) if self._take(size) else None

    def _take(self, size: int) -> bool:
        """Reserve bytes of the device, and return whether there were so many."""
        has_room = self.readings["reserved_bytes"] + size <= self.most_bytes
        self._count(reserved_bytes=size if has_room else 0)
        return has_room

    def _new_addresses(self, size: int) -> int:
        """Return the first of so many addresses that were not used before."""
        address = self._next_address
        self._next_address += round_up(size, LARGE_SEGMENT_BYTES)
        return address

    def _release(self, block: MemoryBlock) -> None:
        """Give a whole segment back."""
        block.pool.remove(block)
        self._count(reserved_bytes=-block.size)

    def _release_oversized(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back free blocks too large to be split, as many as a request needs (release_available_cached_blocks)."""
        most = self.settings.max_split_size_mb * MIB
        wanted, released = max(size, most), 0
        oversized = pool.of_stream(stream, least_bytes=wanted)[:1] or pool.of_stream(stream, least_bytes=most)[::-1]
        for block in oversized:
            if released < wanted:
                released += block.size
                self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back unsplit blocks that were not reused for long (garbage_collect_cached_blocks).

        As in torch that needs a limit of the process's memory.
        """
        threshold = self.settings.garbage_collection_threshold * (self.limit_bytes or 0)
        whole = [block for block in self._large.blocks if not block.is_split and not block.is_expandable]
        while threshold and whole and self.readings["reserved_bytes"] > threshold:
            latest = fmean(block.cached_since for block in whole)
            for block in whole:
                if block.cached_since <= latest:
                    self._release(block)
            whole = [block for block in whole if block.cached_since > latest]

    def _expand(self, pool: Pool, size: int, stream: int) -> MemoryBlock | None:
        """Return a block of an expandable segment, to which pages are mapped (try_allocate_expandable_block)."""
        block = self._find_address_space(pool, size, stream)
        while not block.is_mapped or block.size < size:
            part, missing = (block.next, size - block.size) if block.is_mapped else (block, size)
            assert part is not None  # _find_address_space saw address space after the block
            if not self._map(part, min(missing, part.size)):
                return None
            block = part  # it has taken over the block before it
        pool.remove(block)
        return block

    def _find_address_space(self, pool: Pool, size: int, stream: int) -> MemoryBlock:
        """Return the first free or unmapped block of the stream after which there is enough address space."""
        other: MemoryBlock | None
        for block in pool.of_stream(stream, is_mapped=False):
            if block.previous is not None and not block.previous.is_allocated:
                block = block.previous
            bytes_after, other = 0, block
            while other is not None and not other.is_allocated:
                bytes_after += other.size
                other = other.next
            if bytes_after >= size:
                return block
        # torch reserves 9/8 of the device's memory as addresses.
        space = round_up(self.capacity_bytes * 9 // 8, pool.segment_bytes)
        block = MemoryBlock(self._new_addresses(space), space, stream, pool, is_expandable=True, is_mapped=False)
        pool.insert(block)
        return block

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Map whole pages at the start of an unmapped block; return whether there was memory for them (map_block)."""
        mapped = round_up(size, block.pool.segment_bytes)
        if not self._take(mapped):
            return False
        self._exchange(block, block.address, block.address + mapped)
        return True

    def _unmap(self, block: MemoryBlock) -> None:
        """Give back the whole pages of a free block of an expandable segment (unmap_block)."""
        page_bytes = block.pool.segment_bytes
        start, end = round_up(block.address, page_bytes), (block.address + block.size) // page_bytes * page_bytes
        if start < end and block.is_mapped:
            self._exchange(block, start, end)
            self._count(reserved_bytes=start - end)

    def _exchange(self, block: MemoryBlock, start: int, end: int) -> None:
        """Map the pages of an unmapped block between two addresses, or unmap those of a free one."""
        block.pool.remove(block)
        if start > block.address:
            before, block = block, block.split(start - block.address)
            block.pool.insert(before)
        if block.address + block.size > end:
            block.pool.insert(block.split(end - block.address))
        block.is_mapped = not block.is_mapped
        block.settle()


def replay(requests: Iterable[Request], allocator: CachingAllocator, peaks_from: int) -> None:
    """Let an allocator serve requests, with peaks from the number `peaks_from` on.

    What a measurement allocated in pauses is left out. Raises OutOfDeviceMemoryError, with the number of the request,
    if memory runs out.
    """
    addresses: dict[int, int] = {}
    for number, request in enumerate(requests):
        if number == peaks_from:
            allocator.reset_peaks()
        if request.identity == EMPTY_CACHE:
            allocator.empty_cache()
        elif request.bytes < 0 and request.identity in addresses:
            allocator.free(addresses.pop(request.identity))
        elif request.bytes > 0 and not request.is_paused:
            try:
                addresses[request.identity] = allocator.allocate(request.bytes, request.stream)
            except OutOfDeviceMemoryError as error:
                error.moment = number
                raise
