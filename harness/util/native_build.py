"""Compilation of C++ libraries into a cache folder."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from harness.util.text import UserError, one_line

_announce: ContextVar[Callable[[str], None]] = ContextVar("_announce", default=lambda _: None)

TRITON_CAPABILITY = (7, 0)  # the first compute capability that Triton compiles for


def compiler_problem() -> str | None:
    """Return why no C++ compiler can be used, in one line, or None if there is one. Like torch, try $CXX, then c++."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        return f"no C++ compiler: {command[0]} is not on PATH; install g++ or clang, or name one in CXX"
    return None


def triton_problem(compute_capability: tuple[int, int] | None) -> str | None:
    """Return why torch.compile cannot compile for a GPU with Triton, in one line, or None if it can.

    Triton compiles a launcher in C against Python's headers, with $CC, gcc or clang (its runtime/build.py), for devices
    from compute capability 7.0 on (torch's _inductor/scheduler.py).
    """
    if compute_capability is not None and compute_capability < TRITON_CAPABILITY:
        return "it knows devices of compute capability 7.0 or more, and this one has {}.{}".format(*compute_capability)
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "no C compiler: install gcc or clang, or name one in CC"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return f"Python's headers are not in {headers}; install the package python3-dev of your system"
    return None


def make_extension_folder(cache: Path, name: str, content: str, *packages: str) -> Path:
    """Create and return the cache folder for a library.

    Its name is a key of the source `content`, the versions of `packages` and of Python, and the processor. Raise
    UserError if the cache cannot be written.
    """
    versions = [f"{package}-{importlib.metadata.version(package)}" for package in packages]
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    key = "-".join([*versions, python, platform.machine(), hashlib.sha256(content.encode()).hexdigest()[:10]])
    folder = cache.expanduser().resolve() / name / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache={cache} cannot be written ({error.strerror}): choose another folder") from None
    return folder


def require_compiler() -> None:
    """Raise UserError if there is no C++ compiler."""
    problem = compiler_problem()
    if problem is not None:
        raise UserError(problem)


@contextmanager
def announcing_builds(announce: Callable[[str], None]) -> Iterator[None]:
    """Call `announce` with one line for every library that is compiled in the block, before it is."""
    token = _announce.set(announce)
    try:
        yield
    finally:
        _announce.reset(token)


def run_build(command: list[str], source_name: str, environment: Mapping[str, str]) -> None:
    """Run a compiler, once announced. Raise RuntimeError with the end of its output if it fails."""
    _announce.get()(f"compiling {source_name}, once on this machine, which takes up to a minute")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        tail = one_line((result.stderr or result.stdout)[-2000:])
        raise RuntimeError(f"{source_name} could not be compiled (exit code {result.returncode}): {tail}")


def file_digest(path: Path) -> str:
    """Return the first 16 hexadecimal digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
