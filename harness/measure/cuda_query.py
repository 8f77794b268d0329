"""The program `python -m harness.measure.cuda_query`, which prints every visible device as CUDA describes it.

It prints one list as JSON, with [name, free bytes, total bytes, [major, minor] of the compute capability, or null] of
each device. Asking CUDA initializes the devices, after which a process cannot fork ranks that use them.
"""

import json
import sys
from collections.abc import Iterator

import torch

Description = tuple[str, int, int, tuple[int, int] | None]


def describe_devices() -> Iterator[Description]:
    """Yield every visible device. torch's count is of boards where MIG partitions them, so the end is CUDA's error."""
    for index in range(torch.cuda.device_count()):
        try:
            properties = torch.cuda.get_device_properties(index)
        except (AssertionError, RuntimeError):
            if index == 0:
                raise
            return
        free, total = torch.cuda.mem_get_info(index)
        capability = None if torch.version.hip else (properties.major, properties.minor)
        yield properties.name, free, total, capability


if __name__ == "__main__":
    json.dump(list(describe_devices()), sys.stdout)
