"""Locks on files, which show every command that shares a folder what another one works on.

The operating system releases the lock of a dead process. Where it locks no files, as on Lustre without the mount option
flock, a lease takes the lock's place: a file beside it that its owner touches every RENEWAL_SECONDS, and that counts
for nothing once it is older than LEASE_SECONDS, or its process on this machine is gone. Every lease is a file of its
own, so that nobody removes another's: whoever wants the lock writes a lease first, then looks for others, and withdraws
if there is one.
"""

import errno
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from harness.util.text import UserError, one_line

RENEWAL_SECONDS, LEASE_SECONDS = 5.0, 90.0  # NFS may show a renewal a minute late

POLL_SECONDS = 0.2  # between two attempts to lock

_TAKEN = (errno.EAGAIN, errno.EACCES)

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Lock a file inside the block. Yield whether it was acquired, which can fail only if `wait` is False.

    Raise UserError where files can neither be locked nor written.
    """
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            while not (is_acquired := _acquire(path, descriptor, stack)) and wait:
                time.sleep(POLL_SECONDS)
        except OSError as error:
            raise UserError(f"{path.parent} cannot lock files ({one_line(error)}): choose another folder") from None
        yield is_acquired


def is_locked(path: Path) -> bool:
    """Return whether a process has this lock, on this machine or another that shares the folder."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        return error.errno in _UNSUPPORTED and any(_is_valid(lease, time.time()) for lease in _leases(path))
    finally:
        os.close(descriptor)


def remove_lock(path: Path) -> None:
    """Remove the file of a lock that nobody has, with its leases."""
    for file in (path, *_leases(path)):
        file.unlink(missing_ok=True)


def _acquire(path: Path, descriptor: int, stack: ExitStack) -> bool:
    """Return whether the lock was acquired, which the stack releases."""
    try:
        return _flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    lease = path.with_name(f"{path.name}.{_machine()}.{os.getpid()}.{secrets.token_hex(4)}")
    lease.touch(exist_ok=False)
    with ExitStack() as withdrawal:
        withdrawal.callback(lease.unlink, missing_ok=True)
        now = lease.stat().st_mtime  # by the clock that the file system gives every lease
        for other in _leases(path):
            if other != lease and _is_valid(other, now):
                return False
            if other != lease:
                other.unlink(missing_ok=True)
        stack.push(withdrawal.pop_all())
    released = threading.Event()
    threading.Thread(target=_renew, args=(lease, released), daemon=True).start()
    stack.callback(released.set)
    return True


def _flock(descriptor: int, operation: int) -> bool:
    """Return whether a file was locked. Raise OSError if it cannot be."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def _machine() -> str:
    """Return a name for the processes that have one set of process ids: those of a host, or of a container on it."""
    namespace = Path("/proc/self/ns/pid")
    number = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()}-{number}"


def _leases(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.*"))


def _is_valid(lease: Path, now: float) -> bool:
    """Return whether a lease was renewed lately by a process that may be alive."""
    machine, pid = lease.name.rpartition(".")[0].rpartition(".")[::2]
    try:
        if now - lease.stat().st_mtime > LEASE_SECONDS:
            return False
        if machine.endswith(f".{_machine()}"):
            os.kill(int(pid), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:  # the process of another user
        pass
    return True


def _renew(lease: Path, released: threading.Event) -> None:
    while not released.wait(RENEWAL_SECONDS):
        with suppress(OSError):
            os.utime(lease)
