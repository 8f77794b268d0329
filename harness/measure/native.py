"""Native code the ranks need on a CPU, built once by the parent: our counting allocator, DeepSpeed's collective.

Everything lies in a cache folder, keyed by the versions it was built for. Builds hold a file lock of ours, so parents
that start together build once; the operating system drops that lock when its holder dies.
"""

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from harness.errors import UserError, one_line

_SOURCE = Path(__file__).with_name("allocator.cpp")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall")  # C++20: what torch's headers are written in
_DEEPSPEED_OP = "deepspeed_shm_comm"
# With the operator built, a rank holds torch's lock for the second in which ninja finds nothing to do.
_LOCK_STALE_SECONDS = 30.0


def compiler_problem() -> str | None:
    """Why no C++ compiler can be used, in one line; None if one is found. torch asks $CXX too, then c++."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        return f"no C++ compiler: {command[0]} is not on PATH; install g++ or clang, or name one in CXX"
    return None


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
    folder = _folder(cache, "allocator", _SOURCE.read_text() + " ".join(_FLAGS), "torch")
    built = _whole_allocator(folder)
    if built is not None:
        return built
    _require_compiler()
    with FileLock(folder / "build.lock"):
        return _whole_allocator(folder) or _compile(folder / f"allocator.{os.getpid()}.tmp")


def _whole_allocator(folder: Path) -> Path | None:
    """The library whose name tells its content: one that a full disk or a power cut damaged would kill every rank."""
    return next((path for path in folder.glob("allocator-*.so") if path.name == _allocator_name(path)), None)


def _allocator_name(path: Path) -> str:
    return f"allocator-{_digest(path)}.so"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compile(temporary: Path) -> Path:
    """Compile into a file of our own and rename it, so that a killed build leaves nothing that looks whole."""
    from torch.utils.cpp_extension import include_paths, library_paths

    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    command += [*_FLAGS, *(f"-I{path}" for path in include_paths()), str(_SOURCE), "-o", str(temporary)]
    command += [*(f"-L{path}" for path in library_paths()), "-lc10"]
    command += [f"-Wl,-rpath,{path}" for path in library_paths()]  # macOS looks there even for what is loaded
    try:
        _run(command, "harness/measure/allocator.cpp", os.environ)
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


def build_deepspeed_comm(cache: Path) -> dict[str, str]:
    """What a rank's environment must hold for DeepSpeed on a CPU, its shared-memory collective built (about 30 s).

    DeepSpeed builds that operator in every rank when its communication starts and has no way round it: without a
    compiler the rank dies of ninja's error. torch guards such a build with a bare file `lock`, on which ranks wait
    for ever if its owner was killed; here the build happens once, under our own lock, and stale ones are removed.
    The build runs in a process of its own, which holds our lock itself and so may outlive the caller.

    Raises UserError without a compiler, and RuntimeError with the build's last words if it fails.
    """
    # ninja rebuilds when a command changes: another environment's paths or compiler need a folder of their own.
    commands = f"{sys.prefix} {os.environ.get('CXX', '')}"
    folder = _folder(cache, "torch_extensions", commands, "torch", "deepspeed")
    environment = {
        "TORCH_EXTENSIONS_DIR": str(folder),
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))),  # ninja
        "DS_ACCELERATOR": "cpu",
    }
    _require_compiler()
    if not _complete(folder):
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", __name__, str(folder)]
        _run(command, f"DeepSpeed's {_DEEPSPEED_OP}", os.environ | environment | {"PYTHONPATH": paths})
    _clear_stale_lock(folder / _DEEPSPEED_OP / "lock")
    return environment


def _complete(folder: Path) -> bool:
    """Whether the library that was built is there, and whole."""
    try:
        return (folder / "complete").read_text() == _digest(folder / _DEEPSPEED_OP / f"{_DEEPSPEED_OP}.so")
    except (OSError, ValueError):
        return False


def _build_deepspeed_comm_here(folder: Path) -> None:
    """Build in this process. Until the build is complete no rank starts, so whoever holds our lock builds alone."""
    with FileLock(folder / "build.lock"):
        if _complete(folder):
            return
        shutil.rmtree(folder / _DEEPSPEED_OP, ignore_errors=True)  # ninja would take what is damaged for new
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
        (folder / "complete").write_text(_digest(folder / _DEEPSPEED_OP / f"{_DEEPSPEED_OP}.so"))


def _clear_stale_lock(lock: Path) -> None:
    """Remove the lock a killed rank left; wait while it may belong to a live rank of another run."""
    while True:
        try:
            age_seconds = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if not 0 <= age_seconds <= _LOCK_STALE_SECONDS:  # below 0: the clock was put back since
            lock.unlink(missing_ok=True)
            return
        time.sleep(0.2)


def _folder(cache: Path, name: str, content: str, *packages: str) -> Path:
    """The folder, made, of what depends on the content, these packages' versions, Python and the processor."""
    versions = [f"{package}-{importlib.metadata.version(package)}" for package in packages]
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:10]
    key = "-".join([*versions, python, platform.machine(), digest])
    folder = cache.expanduser().resolve() / name / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache={cache} cannot be written ({error.strerror}): choose another folder") from None
    return folder


def _require_compiler() -> None:
    problem = compiler_problem()
    if problem is not None:
        raise UserError(problem)


def _run(command: list[str], what: str, environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        tail = one_line((done.stderr or done.stdout)[-2000:])
        raise RuntimeError(f"{what} did not build (exit {done.returncode}): {tail}")


if __name__ == "__main__":
    _build_deepspeed_comm_here(Path(sys.argv[1]))
