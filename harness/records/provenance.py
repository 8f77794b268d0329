"""What made a record: versions of packages, the hash of the sources that measure, and their commit."""

import functools
import hashlib
import os
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

import harness

SOURCES = Path(harness.__file__).parent

# What shows, stores, orders or dates measurements without making them: a change there leaves old rows comparable.
NON_MEASURING = ("cli", "sweep", "export", "tracking", "report", "selftest")


@functools.cache
def versions() -> dict[str, str | None]:
    """Versions of what determines a measurement, None if not installed; nothing is imported to learn them."""
    packages: dict[str, str | None] = {}
    for package in ("torch", "deepspeed", "accelerate", "transformers"):
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            packages[package] = None
    return {"python": python_version(), **packages, "harness": harness.__version__, "code": _code()}


def _code() -> str:
    """Hash of the harness's own sources that determine a measurement: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*")):
        relative = path.relative_to(SOURCES)
        if relative.parts[0] in NON_MEASURING or path.suffix not in (".py", ".cpp", ".cu", ".h"):
            continue
        content = path.read_bytes()
        digest.update(f"{relative.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


@functools.cache
def git_commit() -> dict[str, Any] | None:
    """The commit of the harness's sources and whether they differ from it (`dirty`); None outside a repository."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(SOURCES), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, env=environment)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # installed inside another's repository is not in it
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return None


def version_differences(record: Mapping[str, Any], now: dict[str, str | None]) -> list[str]:
    """What differs between the versions that made a record and those given: ["torch 2.12.0 → 2.13.0"].

    A package that is not installed now, as where only the report is read, makes nothing stale.
    """
    made_by = record.get("versions") or {}
    changed = [key for key, version in now.items() if version is not None and made_by.get(key) != version]
    return [f"{key} {made_by.get(key) or 'unknown'} → {now[key]}" for key in changed]
