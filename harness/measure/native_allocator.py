"""The counting allocator for a CPU's memory, a C++ library that the parent builds once.

It lies in a cache folder, keyed by the versions that it was built for. A build holds a file lock, so that parents that
start together build once; the operating system releases the lock when its holder dies.
"""

import ctypes
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from harness.util.native_build import file_digest, make_extension_folder, require_compiler, run_build

_SOURCE = Path(__file__).with_name("allocator.cpp")

_COMPILER_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall")  # torch's headers need C++20


@dataclass(frozen=True)
class Allocator:
    """The counting allocator of this process. It counts bytes as torch requested them, since load_allocator()."""

    library: ctypes.CDLL

    def live_bytes(self) -> int:
        """Return the bytes allocated now."""
        return int(self.library.live_bytes())

    def peak_bytes(self) -> int:
        """Return the most bytes allocated at once since reset_peak()."""
        return int(self.library.peak_bytes())

    def reset_peak(self) -> None:
        """Start a new peak from the bytes allocated now."""
        self.library.reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Make requests that would exceed this many live bytes raise torch.OutOfMemoryError; None is no limit."""
        self.library.set_limit(limit_bytes or 0)

    def begin_log(self) -> None:
        """Log every allocation and free from now on; the log starts with the blocks that are live now."""
        self.library.begin_log()

    def log_length(self) -> int:
        """Return the number of lines logged so far, which serves as the log's clock."""
        return int(self.library.log_length())

    def drop_log(self) -> None:
        """Stop logging without reading the log."""
        self.library.end_log()

    def end_log(self) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """Stop logging and return the log.

        Its shape is (lines, 3): the address, the bytes (negative if freed), and 1 if another thread than the one that
        loaded the allocator requested the block, else 0.
        """
        pointer = ctypes.cast(self.library.end_log(), ctypes.POINTER(ctypes.c_int64))
        lines = self.log_length()
        return np.ctypeslib.as_array(pointer, (lines, 3)).copy() if lines else np.zeros((0, 3), np.int64)


def build_allocator(cache: Path) -> Path:
    """Return the path of the compiled allocator, built in about 2 s if it does not exist.

    Raise UserError without a compiler, and RuntimeError with the compiler's output if it fails.
    """
    folder = make_extension_folder(cache, "allocator", _SOURCE.read_text() + " ".join(_COMPILER_FLAGS), "torch")
    library = _find_library(folder)
    if library is not None:
        return library
    require_compiler()
    with FileLock(folder / "build.lock"):
        return _find_library(folder) or _compile(folder / f"allocator.{os.getpid()}.tmp")


def _find_library(folder: Path) -> Path | None:
    """Return the library whose name has its content's digest; one damaged by a full disk would crash every rank."""
    return next((path for path in folder.glob("allocator-*.so") if path.name == _allocator_name(path)), None)


def _allocator_name(path: Path) -> str:
    return f"allocator-{file_digest(path)}.so"


def _compile(temporary: Path) -> Path:
    """Compile into a temporary file and rename it, so that a killed build leaves no file that looks complete."""
    from torch.utils.cpp_extension import include_paths, library_paths

    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    command += [*_COMPILER_FLAGS, *(f"-I{path}" for path in include_paths()), str(_SOURCE), "-o", str(temporary)]
    command += [*(f"-L{path}" for path in library_paths()), "-lc10"]
    # macOS searches the rpath even for libraries that are loaded already.
    command += [f"-Wl,-rpath,{path}" for path in library_paths()]
    try:
        run_build(command, "harness/measure/allocator.cpp", os.environ)
        return temporary.replace(temporary.with_name(_allocator_name(temporary)))
    finally:
        temporary.unlink(missing_ok=True)


def load_allocator(path: Path) -> Allocator:
    """Make torch take this process's CPU memory from the allocator. Earlier tensors are not counted: call this first.

    Raise RuntimeError if another allocator of higher priority is registered.
    """
    import torch  # noqa: F401  loads the library that the allocator plugs into

    library = ctypes.CDLL(str(path))
    library.install.restype = ctypes.c_int
    library.live_bytes.restype = library.peak_bytes.restype = library.log_length.restype = ctypes.c_int64
    library.reset_peak.restype = library.begin_log.restype = library.set_limit.restype = None
    library.set_limit.argtypes = [ctypes.c_int64]
    library.end_log.restype = ctypes.c_void_p
    if library.install() != 1:
        raise RuntimeError(f"{path.name} is not torch's CPU allocator: another one has a higher priority")
    return Allocator(library)
