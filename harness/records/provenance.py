"""The origin of a record: versions of packages, a hash of the sources that measure, and their commit."""

import functools
import hashlib
import os
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from platform import python_version

import harness
from harness.records.schema import Commit, Record, Row
from harness.util.files import JsonObject

SOURCES = Path(harness.__file__).parent

# The packages that do not affect a measurement: rows stay comparable when these change.
NON_MEASURING = ("cli", "sweep", "export", "tracking", "report", "selftest", "api.py")


@functools.cache
def versions() -> dict[str, str | None]:
    """Return the versions of packages that affect a measurement, None if not installed, without importing them."""
    packages: dict[str, str | None] = dict.fromkeys(("torch", "deepspeed", "accelerate", "transformers"))
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            packages[package] = metadata.version(package)
    return {"python": python_version(), **packages, "harness": harness.__version__, "code": _code()}


def _code() -> str:
    """Return a hash of the harness's own sources that affect a measurement, as 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*")):
        relative = path.relative_to(SOURCES)
        if relative.parts[0] in NON_MEASURING or path.suffix not in (".py", ".toml", ".cpp", ".cu", ".h"):
            continue
        content = path.read_bytes()
        digest.update(f"{relative.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


@functools.cache
def git_commit() -> Commit | None:
    """Return the commit of the harness's sources and whether they differ from it; None outside a repository."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(SOURCES), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, env=environment)
        return result.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails for sources installed inside another repository
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return None


def version_differences(record: Record) -> list[str]:
    """Return which versions of a record differ from the installed ones, such as ["torch 2.12.0 → 2.13.0"].

    A package that is not installed now makes no record stale, since reports may be made where no training library is.
    """
    recorded, installed = record.versions, versions()
    changed = [key for key, version in installed.items() if version is not None and recorded.get(key) != version]
    return [f"{key} {recorded.get(key) or 'unknown'} → {installed[key]}" for key in changed]


def machine_text(record: Record) -> str | None:
    """Return the machine that made a record, such as "AMD EPYC, 2 cores"; None if it is not known.

    A row of runs.csv has it in a column.
    """
    environment = record.environment
    if record.row.get("machine") or not environment:
        return record.row.get("machine")
    device, count, cores = (environment.get(key) for key in ("device_name", "devices", "cores"))
    parts = [
        f"{count} × {device}" if count else None,
        environment.get("processor"),
        f"{cores} cores" if cores else None,
    ]
    return ", ".join(str(part) for part in parts if part) or None


def commit_text(record: Record) -> str | None:
    """Return the commit that made a record, such as "9f40f9e7… with changes"; None if it is not known."""
    commit = record.commit
    return f"{commit['commit']}{' with changes' * commit['dirty']}" if commit else None


def command_text(record: Record) -> str | None:
    """Return the command line that made a record; None if it is not known. A row of runs.csv has it in a column."""
    return record.row.get("command") or record.config.get("command_line") or None


_LIBRARIES = ("cuda", "cudnn", "nccl", "driver")  # of the environment, whose versions are among a row's

_MACHINE = re.compile(
    r"(?:(?P<devices>\d+) × (?P<device_name>[^,]+)(?:, |$))?(?P<processor>.*?)(?:(?:, |^)(?P<cores>\d+) cores)?"
)


def origin_of_row(row: Row) -> JsonObject:
    """Return the parts of a record that its row in runs.csv has as text: machine, versions and commit."""
    entries = dict(entry.split(" ", 1) for entry in (row.get("versions") or "").split(", ") if " " in entry)
    machine = _MACHINE.fullmatch(row.get("machine") or "")
    known = {key: text for key, text in (machine.groupdict() if machine else {}).items() if text}
    known |= {key: int(known[key]) for key in ("devices", "cores") if key in known}
    commit, _, changes = (row.get("commit") or "").partition(" ")
    return {
        "versions": {name: version for name, version in entries.items() if name not in _LIBRARIES},
        "environment": known | {name: entries[name] for name in _LIBRARIES if name in entries},
        "commit": {"commit": commit, "dirty": bool(changes)} if commit else None,
    }


def versions_text(record: Record) -> str | None:
    """Return the versions that made a record, such as "python 3.11.7, torch 2.13.0"; None if they are not known.

    A row of runs.csv has them in a column.
    """
    libraries = {key: record.environment.get(key) for key in _LIBRARIES}
    entries = [f"{key} {version}" for key, version in {**record.versions, **libraries}.items() if version]
    return record.row.get("versions") or ", ".join(entries) or None
