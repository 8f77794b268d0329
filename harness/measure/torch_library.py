"""The build of a C++ library against torch, once for all processes and later commands.

It lies in a cache folder, keyed by the versions that it was built for. A build holds a file lock, so that parents that
start together build once; the operating system releases the lock when its holder dies.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from harness.util.native_build import file_digest, make_extension_folder, require_compiler, run_build

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
    with FileLock(folder / "build.lock"):
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
