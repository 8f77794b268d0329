"""The device guard that makes a CPU build of torch accept tensors on `cuda`: a C++ library, built once."""

import ctypes
import sys
from pathlib import Path

from harness.measure.torch_library import build_torch_library

_SOURCE = Path(__file__).with_name("device_guard.cpp")


def build_device_guard(cache: Path) -> Path:
    """Return the path of the compiled guard. Raise UserError or RuntimeError if it cannot be built."""
    return build_torch_library("the stand-in for a GPU", _SOURCE, cache, ["-O1", "-ltorch_cpu"])


def load_device_guard(path: Path) -> None:
    """Load the guard into this process, for good. Raise RuntimeError if torch is imported already."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the device guard must be loaded before it")
    ctypes.CDLL(str(path))
