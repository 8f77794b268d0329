"""The device guard that lets torch accept tensors on `cuda` without a GPU: a C++ library, built once."""

import ctypes
import importlib
import sys
from pathlib import Path

from harness.hardware.torch_build import is_built_for_gpus
from harness.measure.torch_library import build_torch_library

_SOURCE = Path(__file__).with_name("device_guard.cpp")


def build_device_guard(cache: Path) -> Path:
    """Return the path of the compiled guard. Raise UserError or RuntimeError if it cannot be built."""
    return build_torch_library("the stand-in for a GPU", _SOURCE, cache, ["-O1", "-ltorch_cpu"])


def load_device_guard(path: str) -> None:
    """Load the guard of this path into this process, for good; a build of torch for CUDA is imported too.

    Raise RuntimeError if torch is imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the device guard must be loaded before it")
    library = ctypes.CDLL(path)
    if is_built_for_gpus():
        importlib.import_module("torch")  # it registers the guard of CUDA, which is replaced
        library.install_simulated_guard()
