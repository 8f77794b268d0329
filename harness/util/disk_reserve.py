"""A reserve of disk space, so that the result of a run that fills the disk can still be written."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

RESERVE_BYTES = 2**20  # rows of failed runs take tens of KiB

MIN_FREE_BYTES = 2**22  # the free space needed to start a run: its rank reports and logs take as much

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


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


def release(path: Path) -> bool:
    """Delete the reserve file. Return False if there was none."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def has_free_space(folder: Path) -> bool:
    """Return whether the disk has enough free space to start a run."""
    return shutil.disk_usage(folder).free >= MIN_FREE_BYTES
