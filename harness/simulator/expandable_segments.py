"""Expandable segments of CUDA's caching allocator: address space to which memory is mapped as blocks need it.

The functions follow those of torch's c10/cuda/CUDACachingAllocator.cpp that they name.
"""

from bisect import bisect_left

from harness.simulator.allocator_blocks import Block, DeviceReservation, Pool


def expand(device: DeviceReservation, pool: Pool, size: int, stream: int) -> Block | None:
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


def _find_address_space(device: DeviceReservation, pool: Pool, size: int, stream: int) -> Block:
    """Return the first free or unmapped block of the stream after which there is enough address space."""
    for _, address in pool.unmapped[bisect_left(pool.unmapped, (stream, 0)) :]:
        block = pool.blocks[address]
        if block.stream != stream:
            break
        if block.previous is not None and block.previous.is_available:
            block = block.previous
        bytes_after, other = 0, block
        while other is not None and other.is_available and bytes_after < size:
            bytes_after += other.size
            other = other.next  # type: ignore[assignment]
        if bytes_after >= size:
            return block
    # torch reserves 9/8 of the device's memory as addresses.
    page_bytes = pool.page_bytes
    space = -(-device.capacity_bytes * 9 // 8 // page_bytes) * page_bytes
    block = Block(device.new_addresses(space), space, stream, pool, is_mapped=False, is_expandable=True)
    pool.insert(block)
    return block


def _map(device: DeviceReservation, block: Block, size: int) -> bool:
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


def unmap(device: DeviceReservation, block: Block) -> None:
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
