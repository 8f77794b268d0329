"""The device guard that makes a CPU build of torch accept tensors on `cuda`: a C++ library, built once."""

import ctypes
import sys
from pathlib import Path

from harness.hardware.torch_build import is_built_for_gpus
from harness.measure.torch_library import build_torch_library

_SOURCE = Path(__file__).with_name("device_guard.cpp")


def build_device_guard(cache: Path) -> Path:
    """Return the path of the compiled guard. Raise UserError or RuntimeError if it cannot be built."""
    return build_torch_library("the stand-in for a GPU", _SOURCE, cache, ["-O1", "-ltorch_cpu"])


def needs_device_guard() -> bool:
    """Return whether torch needs the guard: a build for CUDA has its own."""
    return not is_built_for_gpus()


def load_device_guard(path: str | None) -> None:
    """Load the guard of this path into this process, for good. Raise RuntimeError if torch is imported already."""
    if path is None:
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the device guard must be loaded before it")
    ctypes.CDLL(path)
