"""Compilation of C++ libraries into a cache folder."""

import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.util.errors import UserError
from harness.util.text import one_line


def compiler_problem() -> str | None:
    """Return why no C++ compiler can be used, in one line, or None if there is one. Like torch, try $CXX, then c++."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        return f"no C++ compiler: {command[0]} is not on PATH; install g++ or clang, or name one in CXX"
    return None


def make_extension_folder(cache: Path, name: str, content: str, *packages: str) -> Path:
    """Create and return the cache folder for a library.

    Its name is a key of the source `content`, the versions of `packages` and of Python, and the processor. Raise
    UserError if the cache cannot be written.
    """
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


def require_compiler() -> None:
    """Raise UserError if there is no C++ compiler."""
    problem = compiler_problem()
    if problem is not None:
        raise UserError(problem)


def run_build(command: list[str], source_name: str, environment: Mapping[str, str]) -> None:
    """Run a compiler. Raise RuntimeError with the end of its output if it fails."""
    result = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        tail = one_line((result.stderr or result.stdout)[-2000:])
        raise RuntimeError(f"{source_name} could not be compiled (exit code {result.returncode}): {tail}")


def file_digest(path: Path) -> str:
    """Return the first 16 hexadecimal digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
