"""Native code the ranks need on a CPU, built once by the parent: our counting allocator, DeepSpeed's collective.

Everything lies in a cache folder, keyed by the versions it was built for. Builds hold a file lock of ours, so parents
that start together build once; the operating system drops that lock when its holder dies.
"""

import ctypes
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from harness.util.native_build import extensions_folder, file_digest, require_compiler, run_build

_SOURCE = Path(__file__).with_name("allocator.cpp")

_COMPILER_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall")  # C++20: what torch's headers are written in


@dataclass(frozen=True)
class Allocator:
    """The counting allocator of this process. Bytes as torch requested them, since load_allocator()."""

    library: ctypes.CDLL

    def live_bytes(self) -> int:
        return int(self.library.live_bytes())

    def peak_bytes(self) -> int:
        """The most live since reset_peak()."""
        return int(self.library.peak_bytes())

    def reset_peak(self) -> None:
        self.library.reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """From here on a request that would make more live than this is a torch.OutOfMemoryError; None: no limit."""
        self.library.set_limit(limit_bytes or 0)

    def begin_log(self) -> None:
        """From here on every block that comes or goes is written down; those that are live come first."""
        self.library.begin_log()

    def log_length(self) -> int:
        """Lines written so far: a moment, on the log's own clock."""
        return int(self.library.log_length())

    def drop_log(self) -> None:
        """Ends it without looking."""
        self.library.end_log()

    def end_log(self) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """The log, shape (lines, 3): address, bytes (negative: freed), whether another thread did it."""
        found = ctypes.cast(self.library.end_log(), ctypes.POINTER(ctypes.c_int64))
        lines = self.log_length()
        return np.ctypeslib.as_array(found, (lines, 3)).copy() if lines else np.zeros((0, 3), np.int64)


def build_allocator(cache: Path) -> Path:
    """The compiled allocator's path, built (in about 2 s) if it is not there.

    Raises UserError without a compiler, and RuntimeError with the compiler's words if it fails.
    """
    folder = extensions_folder(cache, "allocator", _SOURCE.read_text() + " ".join(_COMPILER_FLAGS), "torch")
    built = _is_complete_library(folder)
    if built is not None:
        return built
    require_compiler()
    with FileLock(folder / "build.lock"):
        return _is_complete_library(folder) or _compile(folder / f"allocator.{os.getpid()}.tmp")


def _is_complete_library(folder: Path) -> Path | None:
    """The library whose name tells its content: one that a full disk or a power cut damaged would kill every rank."""
    return next((path for path in folder.glob("allocator-*.so") if path.name == _allocator_name(path)), None)


def _allocator_name(path: Path) -> str:
    return f"allocator-{file_digest(path)}.so"


def _compile(temporary: Path) -> Path:
    """Compile into a file of our own and rename it, so that a killed build leaves nothing that looks whole."""
    from torch.utils.cpp_extension import include_paths, library_paths

    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    command += [*_COMPILER_FLAGS, *(f"-I{path}" for path in include_paths()), str(_SOURCE), "-o", str(temporary)]
    command += [*(f"-L{path}" for path in library_paths()), "-lc10"]
    command += [f"-Wl,-rpath,{path}" for path in library_paths()]  # macOS looks there even for what is loaded
    try:
        run_build(command, "harness/measure/allocator.cpp", os.environ)
        return temporary.replace(temporary.with_name(_allocator_name(temporary)))
    finally:
        temporary.unlink(missing_ok=True)


def load_allocator(path: Path) -> Allocator:
    """Make torch take this process's CPU memory from the allocator. Earlier tensors are not counted: call this first.

    Raises RuntimeError if another allocator of higher priority stands in the way.
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
