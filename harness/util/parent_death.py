"""The end of a process together with its parent."""

import ctypes
import signal
import sys

PARENT_VARIABLE = "HARNESS_FORKSERVER_PARENT"  # the forkserver's variable with its parent's process id

PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h: the signal this process gets when its parent dies

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a fork: a child only calls it


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent dies, even during an import in C.

    This exists on Linux only.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, number)
