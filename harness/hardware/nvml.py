"""TODO harness.hardware.nvml."""

import os
from typing import Any


def visible_devices(count: int) -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",")[:count] if listed else [str(index) for index in range(count)]


def nvml_handle(pynvml: "object", entry: str) -> object:
    by_index = entry.strip().isdigit()
    if by_index:
        return pynvml.nvmlDeviceGetHandleByIndex(int(entry))  # type: ignore[attr-defined]
    return pynvml.nvmlDeviceGetHandleByUUID(entry.strip())  # type: ignore[attr-defined]


def nvml_or_none(function: Any, *arguments: Any) -> Any:
    """What NVML says, None where it does not: it refuses many things on virtual and cut-up devices."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None
