"""The model of CUDA's caching allocator: by hand, and by what must hold after any sequence of requests."""

import random
from itertools import pairwise

import pytest

from harness.simulator.allocator_blocks import MIB, PLACE, AllocatorSettings, MemoryBlock, parse_allocator_settings
from harness.simulator.caching_allocator import CachingAllocator, OutOfDeviceMemoryError
from harness.util.errors import UserError

GIB = 2**30


def allocator_of(text: str = "", capacity_bytes: int = 80 * GIB, limit_bytes: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity_bytes, parse_allocator_settings(text), limit_bytes)


# --- sizes of blocks and segments, from the table in torch's documentation of the allocator


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # A rest of at most 1 MiB in the large pool is no block of its own.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_a_first_block_reserves_a_segment(requested: int, allocated: int, reserved: int) -> None:
    allocator = allocator_of()
    allocator.allocate(requested)
    sizes = {"requested_bytes": requested, "allocated_bytes": allocated, "reserved_bytes": reserved}
    assert allocator.readings == allocator.peaks == sizes


def test_expandable_segments_reserve_pages_only() -> None:
    allocator = allocator_of("expandable_segments:True")
    first = allocator.allocate(30 * MIB)
    assert allocator.readings["reserved_bytes"] == 40 * MIB
    allocator.allocate(10 * MIB)  # the rest of the second page
    assert allocator.readings["reserved_bytes"] == 40 * MIB
    allocator.allocate(25 * MIB)
    assert allocator.readings["reserved_bytes"] == 80 * MIB
    allocator.free(first)
    allocator.empty_cache()  # one whole page of the first block, and none of the half that shares its page
    assert allocator.readings["reserved_bytes"] == 60 * MIB


def test_freed_blocks_are_merged_and_reused() -> None:
    allocator = allocator_of()
    parts = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.readings["reserved_bytes"] == 20 * MIB
    for part in parts[:2]:
        allocator.free(part)
    assert allocator.allocate(8 * MIB) == parts[0]
    assert allocator.readings["reserved_bytes"] == 20 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = allocator_of()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(24 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(22 * MIB) == small


def test_streams_share_no_blocks() -> None:
    allocator = allocator_of()
    allocator.free(allocator.allocate(30 * MIB, stream=0))
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.readings["reserved_bytes"] == 60 * MIB


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = allocator_of(capacity_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.readings["reserved_bytes"] == 80 * MIB
    with pytest.raises(OutOfDeviceMemoryError):
        allocator.allocate(22 * MIB)


def test_fragments_run_out_of_memory_where_pages_do_not() -> None:
    """Free parts of two segments serve no request for their sum, unless pages can be moved."""

    def fragment(allocator: CachingAllocator) -> None:
        kept = []
        for _ in range(2):
            freed = allocator.allocate(40 * MIB)
            allocator.free(freed)
            kept += [allocator.allocate(24 * MIB)]  # in the freed segment
        allocator.allocate(40 * MIB)

    with pytest.raises(OutOfDeviceMemoryError):
        fragment(allocator_of(capacity_bytes=100 * MIB))
    fragment(allocator_of("expandable_segments:True", capacity_bytes=100 * MIB))


def test_settings_change_what_is_split_rounded_and_collected() -> None:
    unsplit = allocator_of("max_split_size_mb:32")
    unsplit.free(unsplit.allocate(64 * MIB))
    unsplit.allocate(20 * MIB)  # would be a part of the 64 MiB
    assert unsplit.readings["reserved_bytes"] == 84 * MIB
    unsplit.allocate(60 * MIB)  # within max_non_split_rounding_mb
    assert unsplit.readings["reserved_bytes"] == unsplit.readings["allocated_bytes"] == 84 * MIB
    rounded = allocator_of("roundup_power2_divisions:4")
    assert [rounded.round_size(size) for size in (1200, 2049, 5000)] == [1536, 2560, 5120]
    collected = allocator_of("garbage_collection_threshold:0.5", limit_bytes=100 * MIB)
    collected.free(collected.allocate(60 * MIB))
    collected.allocate(62 * MIB)  # more than was freed: the old segment goes before the limit is reached
    assert collected.readings["reserved_bytes"] == 62 * MIB


def test_an_unknown_setting_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="roundup_power2_divisions"):
        parse_allocator_settings("roundup_power2_divisions:[64:8")
    assert parse_allocator_settings("backend:native, expandable_segments:True") == AllocatorSettings(True)


# --- what must hold after any sequence of requests


def all_blocks(allocator: CachingAllocator) -> list[MemoryBlock]:
    return [*allocator._active.values(), *allocator._small.blocks, *allocator._large.blocks]


def check(allocator: CachingAllocator) -> None:
    """Check that segments are filled by their blocks without gap or overlap, and that the sums are right."""
    blocks = all_blocks(allocator)
    assert sum(block.size for block in blocks if block.is_mapped) == allocator.readings["reserved_bytes"]
    assert sum(block.size for block in blocks if block.is_allocated) == allocator.readings["allocated_bytes"]
    by_address = sorted(blocks, key=lambda block: block.address)
    for before, after in pairwise(by_address):
        assert before.address + before.size <= after.address
    for block in blocks:
        if block.next is not None:
            assert block.next.previous is block
            assert block.next.address == block.address + block.size
            both_free = not block.is_allocated and not block.next.is_allocated
            assert not (both_free and block.is_mapped == block.next.is_mapped), "free neighbors stay apart"
    for pool in (allocator._small, allocator._large):
        assert pool.blocks == sorted(pool.blocks, key=PLACE)


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.6",
        "roundup_power2_divisions:8",
        "expandable_segments:True,garbage_collection_threshold:0.6",
    ],
)
def test_blocks_fill_their_segments_after_any_sequence(settings: str) -> None:
    source = random.Random(settings)
    allocator = allocator_of(settings, capacity_bytes=GIB, limit_bytes=GIB)
    live: list[int] = []
    for number in range(1000):
        choice = source.random()
        if choice < 0.55:
            size = int(2 ** source.uniform(4, 27))
            try:
                live.append(allocator.allocate(size, source.choice((0, 0, 0, 1))))
            except OutOfDeviceMemoryError:
                for address in live[::2]:
                    allocator.free(address)
                live = live[1::2]
        elif choice < 0.9 and live:
            address = live.pop(source.randrange(len(live)))
            allocator.free(address)
        elif choice > 0.995:
            allocator.empty_cache()
        if number % 25 == 0:
            check(allocator)
    for address in live:
        allocator.free(address)
    allocator.empty_cache()
    check(allocator)
    assert set(allocator.readings.values()) == {0}
    peaks = allocator.peaks
    assert peaks["reserved_bytes"] >= peaks["allocated_bytes"] >= peaks["requested_bytes"]
