"""File locks that show which runs a command works on; the operating system releases those of a dead process."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from harness.util.text import UserError, one_line


@contextmanager
def run_lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a run inside the block. Yield whether it was acquired, which can fail only if `wait` is False.

    The operating system releases the lock when its holder dies. Raise UserError where files cannot be locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"results_dir: {path.parent.parent} cannot lock files ({one_line(error)}): choose another folder"
        ) from None
    try:
        yield True
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a command works on this run, on this machine or another that shares the folder."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)
    return False
