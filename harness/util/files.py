"""Files that are written whole or not at all, and a reserve of disk space.

By the reserve, the result of a run that fills the disk can still be written.
"""

import errno
import json
import math
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

RESERVE_BYTES = 2**20  # rows of failed runs take tens of KiB

MIN_FREE_BYTES = 2**22  # the free space needed to start a run: its rank reports and logs take as much

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)

JsonObject = dict[str, Any]  # an object of JSON, where it is read from or written to a file or another process


def atomic_write_text(path: Path, text: str) -> None:
    """Write text in UTF-8 with atomic_write_bytes; lone surrogates are escaped."""
    atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Create or replace a file in one step, so that even after a crash readers see it whole, old or new."""
    temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def atomic_write_json(path: Path, value: Any) -> None:
    """Write a value as JSON with atomic_write_text; numbers that are not finite become null, as JSON has none."""
    atomic_write_text(path, json.dumps(replace_non_finite(value), indent=2, allow_nan=False) + "\n")


def read_json_object(path: Path) -> JsonObject:
    """Return the object in a file of JSON; an empty one if there is no such file, or none that is whole."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def replace_non_finite(value: Any) -> Any:
    """Return a copy of nested plain values in which NaN and infinities are None and tuples are lists."""
    if isinstance(value, dict):
        return {key: replace_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that the disk, or the user's quota of it, is full."""
    return error.errno in _DISK_FULL_ERRNOS


def reserve(path: Path) -> None:
    """Write the reserve file of RESERVE_BYTES. Raise OSError, and leave no file, where there is too little space."""
    if path.exists() and path.stat().st_size == RESERVE_BYTES:
        return
    try:
        path.write_bytes(os.urandom(RESERVE_BYTES))  # random: a file system could compress repeated bytes
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def release(path: Path) -> None:
    """Delete the reserve file, if there is one."""
    with suppress(OSError):
        path.unlink()


def has_free_space(folder: Path) -> bool:
    """Return whether the disk has enough free space to start a run."""
    return shutil.disk_usage(folder).free >= MIN_FREE_BYTES
