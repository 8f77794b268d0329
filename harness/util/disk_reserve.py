"""Room on the disk kept back, so that a run that fills it can still become a row."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

RESERVE_BYTES = 2**20  # rows of failed runs take tens of KiB

LEAST_BYTES = 2**22  # free, to begin a run: its rank files and logs take as much

FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: OSError) -> bool:
    return error.errno in FULL


def reserve(path: Path) -> None:
    """Takes the room, filled as far as the file system lets it be. Raises OSError."""
    if path.exists() and path.stat().st_size == RESERVE_BYTES:
        return
    try:
        path.write_bytes(os.urandom(RESERVE_BYTES))  # nothing that a file system could leave out as empty or repeated
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def release(path: Path) -> bool:
    """Gives the room back; whether there was any."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def has_free_space(folder: Path) -> bool:
    """Whether there is enough to begin a run."""
    return shutil.disk_usage(folder).free >= LEAST_BYTES
