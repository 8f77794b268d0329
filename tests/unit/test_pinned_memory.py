"""What torch's allocator of pinned memory does with sizes, as the notes on offload say."""

from pathlib import Path

import torch

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "core" / "CachingHostAllocator.h"


def test_pinned_memory_is_rounded_to_powers_of_two_up_to_a_threshold() -> None:
    """If this changes, offloaded state no longer takes up to twice its bytes, and the notes on it are out of date."""
    text = " ".join(HEADER.read_text().split())
    assert "if (size <= pinned_max_round_threshold() &&" in text
    assert "return c10::llvm::PowerOf2Ceil(size);" in text
