"""The settings of CUDA's caching allocator that decide how much memory it reserves."""

import math
from dataclasses import dataclass

from harness.util.errors import UserError

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


def parse_allocator_settings(text: str) -> AllocatorSettings:
    """Return the settings of a value of PYTORCH_CUDA_ALLOC_CONF.

    Raises UserError if a setting is unknown, or if rounding differs by size, which is not modeled.
    """
    values: dict[str, float | int | bool] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, _, value = (piece.strip() for piece in part.partition(":"))
        try:
            if name == "expandable_segments":
                values[name] = {"True": True, "true": True, "False": False, "false": False}[value]
            elif name == "max_split_size_mb":
                values["max_split_bytes"] = int(value) * MIB
            elif name == "max_non_split_rounding_mb":
                values["max_non_split_rounding_bytes"] = int(value) * MIB
            elif name == "roundup_power2_divisions":
                values[name] = int(value)
            elif name == "garbage_collection_threshold":
                values[name] = float(value)
            elif not name.startswith(IGNORED):
                raise KeyError(name)
        except (KeyError, ValueError):
            raise UserError(
                f"PYTORCH_CUDA_ALLOC_CONF={text}: the model of the allocator does not know {part}; leave it out"
            ) from None
    return AllocatorSettings(**values)  # type: ignore[arg-type]
