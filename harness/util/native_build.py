"""TODO harness.util.native_build."""

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
    """Why no C++ compiler can be used, in one line; None if one is found. torch asks $CXX too, then c++."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        return f"no C++ compiler: {command[0]} is not on PATH; install g++ or clang, or name one in CXX"
    return None


def extensions_folder(cache: Path, name: str, content: str, *packages: str) -> Path:
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


def require_compiler() -> None:
    problem = compiler_problem()
    if problem is not None:
        raise UserError(problem)


def run_build(command: list[str], what: str, environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        tail = one_line((done.stderr or done.stdout)[-2000:])
        raise RuntimeError(f"{what} did not build (exit {done.returncode}): {tail}")


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
