"""The counting allocator for a CPU's memory, a C++ library that the parent builds once."""

import ctypes
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.util.locks import file_lock
from harness.util.native_build import file_digest, make_extension_folder, require_compiler, run_build

_SOURCE = Path(__file__).with_name("allocator.cpp")

# A line has the address, the bytes (negative if freed), and 1 if another thread than the one that loaded the allocator
# requested the block, else 0.
LogLines = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Allocator(Protocol):
    """An allocator that counts bytes as tensors request them, and can log every request."""

    live_bytes: Callable[[], int]  # those allocated now
    peak_bytes: Callable[[], int]  # the most allocated at once since reset_peak()
    reset_peak: Callable[[], object]  # start a new peak from the bytes allocated now
    begin_log: Callable[[], int]  # log what is allocated and freed, first the blocks that are live now; their number
    log_length: Callable[[], int]  # the number of lines logged so far, which serves as the log's clock
    pause_log: Callable[[bool], int]  # exclude the lines from now on from the log's peak, or include them; their number
    end_log: Callable[[], int]  # stop logging; the most bytes that were live at once after a line outside pauses
    set_limit: Callable[[int], object]  # requests beyond so many live bytes raise torch.OutOfMemoryError; 0 is no limit

    def read_log(self) -> LogLines:
        """Return the log, after end_log()."""


class AllocatorLibrary(ctypes.CDLL):
    """The library, whose functions are those of an Allocator."""

    def read_log(self) -> LogLines:
        """Return the log, after end_log()."""
        lines, pointer = self.log_length(), ctypes.cast(self.log_lines(), ctypes.POINTER(ctypes.c_int64))
        return np.ctypeslib.as_array(pointer, (lines, 3)).copy() if lines else np.zeros((0, 3), np.int64)


def build_allocator(cache: Path) -> Path:
    """Return the path of the compiled allocator. Raise UserError or RuntimeError if it cannot be built."""
    return build_torch_library("the counting allocator", _SOURCE, cache, ["-O2"])


def load_allocator(path: Path) -> Allocator:
    """Make torch take this process's CPU memory from the allocator. Earlier tensors are not counted: call this first.

    Raise RuntimeError if another allocator of higher priority is registered.
    """
    import torch  # noqa: F401  loads the library that the allocator plugs into

    library: Any = AllocatorLibrary(str(path))
    library.install.restype = ctypes.c_int
    counts = (library.live_bytes, library.peak_bytes, library.begin_log, library.log_length)
    for count in (*counts, library.pause_log, library.end_log):
        count.restype = ctypes.c_int64
    library.set_limit.argtypes = [ctypes.c_int64]
    library.log_lines.restype = ctypes.c_void_p
    if library.install() != 1:
        raise RuntimeError(f"{path.name} is not torch's CPU allocator: another one has a higher priority")
    allocator: Allocator = library
    return allocator


_COMPILER_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-Wall")  # torch's headers need C++20


def build_torch_library(title: str, source: Path, cache: Path, flags: Sequence[str]) -> Path:
    """Return the path of the library compiled from `source` with these flags, built in 2 to 3 s if it does not exist.

    The build is announced by its title.

    Raise UserError without a compiler, and RuntimeError with the compiler's output if it fails.
    """
    name, flags = source.stem, [*_COMPILER_FLAGS, *flags]
    folder = make_extension_folder(cache, name, source.read_text() + " ".join(flags), "torch")
    library = _find_library(folder, name)
    if library is not None:
        return library
    require_compiler()
    with file_lock(folder / "build.lock"):
        return _find_library(folder, name) or _compile(title, source, flags, folder / f"{name}.{os.getpid()}.tmp")


def _find_library(folder: Path, name: str) -> Path | None:
    """Return the library whose name has its content's digest; one damaged by a full disk would crash every rank."""
    return next((path for path in folder.glob(f"{name}-*.so") if path.name == _library_name(name, path)), None)


def _library_name(name: str, path: Path) -> str:
    return f"{name}-{file_digest(path)}.so"


def _compile(title: str, source: Path, flags: Sequence[str], temporary: Path) -> Path:
    """Compile into a temporary file and rename it, so that a killed build leaves no file that looks complete."""
    from torch.utils.cpp_extension import include_paths, library_paths

    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    command += [*(f"-I{path}" for path in include_paths()), str(source), "-o", str(temporary)]
    command += [*(f"-L{path}" for path in library_paths()), *flags, "-lc10"]
    # A library that is loaded before torch must find torch's libraries; macOS searches the rpath in any case.
    command += [f"-Wl,-rpath,{path}" for path in library_paths()]
    try:
        run_build(command, f"{title} {source.relative_to(Path(__file__).parents[2])}", os.environ)
        return temporary.replace(temporary.with_name(_library_name(source.stem, temporary)))
    finally:
        temporary.unlink(missing_ok=True)
