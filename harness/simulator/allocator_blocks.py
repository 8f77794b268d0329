"""Blocks of CUDA's caching allocator, and the pools in which the free ones wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * 2**20  # large_segment_size: of blocks below kMinLargeAlloc


@dataclass(eq=False)
class Block:
    """A part of a segment, allocated or free; `previous` and `next` are its neighbors in the segment."""

    address: int
    size: int
    stream: int
    pool: Pool
    requested_bytes: int = 0
    is_allocated: bool = False
    is_pending: bool = False  # freed, while another stream may still use it
    is_mapped: bool = True  # False for address space of an expandable segment without memory
    is_expandable: bool = False
    previous: Block | None = None
    next: Block | None = None
    cached_since: int = 0  # the pool's count of searches when the block was freed

    @property
    def expandable_size(self) -> int:
        """The bytes to which a free block can grow without moving."""
        after = self.next
        return self.size + (after.size if after is not None and not after.is_mapped else 0)

    @property
    def is_available(self) -> bool:
        """Whether the block can be allocated or merged."""
        return not self.is_allocated and not self.is_pending

    @property
    def is_split(self) -> bool:
        """Whether the block is a part of its segment only."""
        return self.previous is not None or self.next is not None

    def split(self, size: int) -> Block:
        """Keep the first bytes, and return a block of the rest; neither is in a pool."""
        rest = Block(self.address + size, self.size - size, self.stream, self.pool, is_expandable=self.is_expandable)
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def merge(self, neighbor: Block | None) -> None:
        """Take over a neighbor that is in the pool, if it is as this block, which is not (try_merge_blocks)."""
        if neighbor is None or not neighbor.is_available or neighbor.is_mapped != self.is_mapped:
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
    blocks: dict[int, Block] = field(default_factory=dict)  # free and unmapped ones by address
    searches: int = 0

    @property
    def page_bytes(self) -> int:
        """The bytes that expandable segments map at once."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def insert(self, block: Block) -> None:
        """Add a free or unmapped block."""
        self.blocks[block.address] = block
        if block.is_mapped:
            block.cached_since = self.searches
            insort(self.free, (block.stream, block.size, block.address))
        else:
            insort(self.unmapped, (block.stream, block.address))

    def remove(self, block: Block) -> None:
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
