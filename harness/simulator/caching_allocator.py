"""A model of CUDA's caching allocator: which segments it reserves for the blocks that a program allocates and frees.

It follows torch's c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13), whose functions the methods name. Left out
are private pools of CUDA graphs, peer access, blocks that wait for other streams, and the memory that other processes
and CUDA's context take.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain

from harness.config.byte_size import format_bytes
from harness.simulator import allocator_blocks
from harness.simulator.allocator_blocks import (
    LARGE_SEGMENT_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    DeviceReservation,
    MemoryBlock,
    Pool,
)
from harness.simulator.fake_memory import Request

MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is a multiple of it
SMALL_BYTES = 2**20  # kSmallSize: the largest block of the small pool
MIN_LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc: from this size on a segment has the size of its first block
LARGE_ROUNDING_BYTES = 2 * 2**20  # kRoundLarge


class OutOfDeviceMemoryError(Exception):
    """The device has no memory left for a block, even after all cached segments were given back."""

    moment = sys.maxsize  # the number of the request that could not be served, or the end


class CachingAllocator:
    """A caching allocator of one device; streams and addresses are integers."""

    def __init__(
        self, capacity_bytes: int, settings: AllocatorSettings | None = None, limit_bytes: int | None = None
    ) -> None:
        """Model a device with so much memory for segments, and a limit by set_per_process_memory_fraction."""
        self.device = DeviceReservation(capacity_bytes, limit_bytes)
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = self.requested_bytes = 0
        self._peak_allocated_bytes = self._peak_requested_bytes = 0
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._active: dict[int, MemoryBlock] = {}  # allocated blocks by address

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments."""
        return self.device.reserved_bytes

    @property
    def peaks(self) -> dict[str, int]:
        """The highest readings since the last reset, by the names of a rank's report."""
        return {
            "peak_allocated_bytes": self._peak_allocated_bytes,
            "peak_requested_bytes": self._peak_requested_bytes,
            "peak_reserved_bytes": self.device.peak_bytes,
        }

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate a block of so many bytes for a stream and return its address (malloc).

        Raises OutOfDeviceMemoryError as torch does: after it has given back what it had cached.
        """
        rounded = self.round_size(size)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        block = self._find_free_block(pool, rounded, stream)
        if block is None:
            self._collect_garbage()
            block = self._reserve(pool, rounded, stream)
        if block is None and self._release_oversized(pool, rounded, stream):
            block = self._reserve(pool, rounded, stream)
        if block is None:
            self.empty_cache()
            block = self._reserve(pool, rounded, stream)
        if block is None:
            in_use = f"{format_bytes(self.allocated_bytes)} allocated and {format_bytes(self.reserved_bytes)} reserved"
            limit = f"the {format_bytes(self.device.most_bytes)} that the process may reserve"
            raise OutOfDeviceMemoryError(f"{format_bytes(size)} do not fit beside {in_use} of {limit}")
        if self._should_split(block, rounded):
            pool.insert(block.split(rounded))
        block.is_allocated, block.requested_bytes = True, size
        self._active[block.address] = block
        self.allocated_bytes += block.size
        self.requested_bytes += size
        self._peak_allocated_bytes = max(self._peak_allocated_bytes, self.allocated_bytes)
        self._peak_requested_bytes = max(self._peak_requested_bytes, self.requested_bytes)
        return block.address

    def free(self, address: int) -> None:
        """Free a block, merge it with free neighbors, and put it into its pool (free_block)."""
        block = self._active.pop(address)
        block.is_allocated = False
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested_bytes
        block.merge(block.previous)
        block.merge(block.next)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give back segments and pages in which nothing is allocated (release_cached_blocks)."""
        for pool in (self._large, self._small):
            for _, _, address in tuple(pool.free):
                block = pool.blocks.get(address)
                if block is None:
                    continue  # merged with a block that was unmapped
                if block.is_expandable:
                    allocator_blocks.unmap(self.device, block)
                elif not block.is_split:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Start new peaks from the present readings."""
        self._peak_allocated_bytes, self._peak_requested_bytes = self.allocated_bytes, self.requested_bytes
        self.device.peak_bytes = self.reserved_bytes

    def round_size(self, size: int) -> int:
        """Return the bytes of the block for a request."""
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and size > MIN_BLOCK_BYTES * divisions:
            power = 1 << (size.bit_length() - 1)
            step = max(1, power >> (divisions.bit_length() - 1))
            return size if size == power else -(-size // step) * step
        return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)

    def _find_free_block(self, pool: Pool, size: int, stream: int) -> MemoryBlock | None:
        """Return the smallest free block of the stream that is large enough, taken out of its pool (get_free_block)."""
        pool.searches += 1
        place = bisect_left(pool.free, (stream, size, 0))
        if place == len(pool.free) or pool.free[place][0] != stream:
            return None
        block = pool.blocks[pool.free[place][2]]
        if block.is_expandable:
            # An expandable segment counts with the size to which it can grow.
            for other_stream, _, address in pool.free[place + 1 :]:
                other = pool.blocks[address]
                if other_stream != stream or other.expandable_size >= block.expandable_size:
                    break
                block = other
        most = self.settings.max_split_bytes
        if size < most <= block.size:
            return None
        if size >= most and block.size >= size + self.settings.max_non_split_rounding_bytes:
            return None
        pool.remove(block)
        return block

    def _should_split(self, block: MemoryBlock, size: int) -> bool:
        remaining = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        return size < self.settings.max_split_bytes and remaining > SMALL_BYTES

    def _reserve(self, pool: Pool, size: int, stream: int) -> MemoryBlock | None:
        """Return a block of a new segment, or of an expandable one that grows; None without memory (alloc_block)."""
        if self.settings.expandable_segments:
            return allocator_blocks.expand(self.device, pool, size, stream)
        if size <= SMALL_BYTES:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES
        if not self.device.reserve(segment_bytes):
            return None
        return MemoryBlock(self.device.new_addresses(segment_bytes), segment_bytes, stream, pool)

    def _release(self, block: MemoryBlock) -> None:
        """Give a whole segment back."""
        block.pool.remove(block)
        self.device.release(block.size)

    def _release_oversized(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back free blocks too large to be split, as many as a request needs (release_available_cached_blocks)."""
        most = self.settings.max_split_bytes
        if most == float("inf"):
            return False
        wanted = max(size, int(most))
        place = bisect_left(pool.free, (stream, wanted, 0))
        if place < len(pool.free) and pool.free[place][0] == stream:
            self._release(pool.blocks[pool.free[place][2]])
            return True
        released = 0
        while place and released < wanted:
            place -= 1
            other_stream, other_size, address = pool.free[place]
            if other_stream != stream or other_size < most:
                break
            released += other_size
            self._release(pool.blocks[address])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back unsplit blocks that were not reused for long (garbage_collect_cached_blocks).

        As in torch that needs a limit of the process's memory.
        """
        threshold = self.settings.garbage_collection_threshold * (self.device.limit_bytes or 0)
        if not threshold or self.reserved_bytes <= threshold:
            return
        excess = self.reserved_bytes - threshold
        pool = self._large
        ages = {
            address: pool.searches - block.cached_since
            for address, block in pool.blocks.items()
            if block.is_mapped and not block.is_split and not block.is_expandable
        }
        while excess > 0 and ages:
            oldest = sum(ages.values()) / len(ages)
            for address in [address for address, age in ages.items() if age >= oldest]:
                excess -= pool.blocks[address].size
                self._release(pool.blocks[address])
                del ages[address]


def replay(requests: Iterable[Request], allocator: CachingAllocator, pauses: Iterable[range], peaks_from: int) -> None:
    """Let an allocator serve requests, with peaks from the number `peaks_from` on.

    What a measurement allocated in pauses, which are numbers of requests, is left out. Raises OutOfDeviceMemoryError,
    with the number of the request, if memory runs out.
    """
    paused = set(chain.from_iterable(pauses))
    addresses: dict[int, int] = {}
    for number, request in enumerate(requests):
        if number == peaks_from:
            allocator.reset_peaks()
        if request.bytes < 0 and request.identity in addresses:
            allocator.free(addresses.pop(request.identity))
        elif request.bytes > 0 and number not in paused:
            try:
                addresses[request.identity] = allocator.allocate(request.bytes, request.stream)
            except OutOfDeviceMemoryError as error:
                error.moment = number
                raise
