"""The model of CUDA's caching allocator: by hand, and by what must hold after any sequence of requests."""

import random
import re
from itertools import pairwise

import pytest

from harness.simulator.allocator_blocks import MIB, PLACE, AllocatorSettings, MemoryBlock, parse_allocator_settings
from harness.simulator.caching_allocator import CachingAllocator, OutOfDeviceMemoryError, replay
from harness.simulator.fake_memory import EMPTY_CACHE, Request
from harness.util.text import UserError

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


# Settings, the MiB of the device, and what is done: `+a30` allocates a block `a` of 30 MiB, on another stream if its
# name is a capital, `-a` frees it, `x` empties the cache, and `=40` says that 40 MiB are reserved. A block whose name
# has a prime is at the address of the earlier one of that name.
SEQUENCES = {
    # The second block is in the rest of the second page. Of the first, one whole page is given back at the end.
    "expandable segments reserve pages": ("expandable_segments:True", 0, "+a30 =40 +b10 =40 +c25 =80 -a x =60"),
    "freed blocks are merged": ("", 0, "+a4 +b4 +c4 +d4 +e4 =20 -a -b +a'8 =20"),
    "the smallest block is taken": ("", 0, "+a40 +b24 -a -b +b'22 =64"),
    "streams share no blocks": ("", 0, "+a30 -a +B30 =60"),
    "cached segments are given back": ("", 100, "+a60 -a +b80 =80"),
    # The second would be a part of the 64 MiB; the third is within max_non_split_rounding_mb.
    "large blocks are not split": ("max_split_size_mb:32", 0, "+a64 -a +b20 =84 +a'60 =84"),
    # More is requested than was freed: the old segment goes before the limit is reached.
    "garbage is collected": ("garbage_collection_threshold:0.5", 100, "+a60 -a +b62 =62"),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_by_hand(name: str) -> None:
    settings, capacity, sequence = SEQUENCES[name]
    allocator = allocator_of(settings, capacity * MIB or 80 * GIB, capacity * MIB or None)
    addresses: dict[str, int] = {}
    for action, block, size in re.findall(r"([-+x=])([a-zA-Z]?'?)(\d*)", sequence):
        if action == "+":
            address = allocator.allocate(int(size) * MIB, stream=int(block.isupper()))
            assert addresses.setdefault(block.removesuffix("'"), address) == address
        elif action == "-":
            allocator.free(addresses[block])
        elif action == "x":
            allocator.empty_cache()
        else:
            assert allocator.readings["reserved_bytes"] == int(size) * MIB


def test_a_program_can_give_back_what_is_cached() -> None:
    """As DeepSpeed does before it flattens parameters, and the worker after the first update."""
    requests = [Request(1, 64 * MIB, 0, False), Request(1, -64 * MIB, 0, False), Request(EMPTY_CACHE, 0, 0, False)]
    for end, reserved in ((2, 64 * MIB), (3, 0)):
        allocator = allocator_of()
        replay(requests[:end], allocator, 0)
        assert allocator.readings["reserved_bytes"] == reserved


def test_fragments_run_out_of_memory_where_pages_do_not() -> None:
    """Free parts of two segments serve no request for their sum, unless pages can be moved."""

    def fragment(allocator: CachingAllocator) -> None:
        kept = []
        for _ in range(2):
            freed = allocator.allocate(40 * MIB)
            allocator.free(freed)
            kept += [allocator.allocate(24 * MIB)]  # in the freed segment
        allocator.allocate(40 * MIB)

    with pytest.raises(OutOfDeviceMemoryError, match=r"beside .* and 80.0 MiB reserved"):
        fragment(allocator_of(capacity_bytes=100 * MIB))
    fragment(allocator_of("expandable_segments:True", capacity_bytes=100 * MIB))


def test_sizes_are_rounded_to_parts_of_powers_of_two() -> None:
    rounded = allocator_of("roundup_power2_divisions:4")
    assert [rounded.round_size(size) for size in (1200, 2049, 5000)] == [1536, 2560, 5120]


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
            allocator.free(live.pop(source.randrange(len(live))))
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
