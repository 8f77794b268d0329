"""Imported first by the forkserver, the bare process that forks the ranks: importing it ties both to the parent.

A thread would do for the ranks, and each has one (harness.rank), but it starts only when the rank runs our code: a
parent killed while its ranks are being started would leave them, and the forkserver's imports, running for seconds.
"""

import ctypes
import os
import signal
import sys

CHECK_SECONDS = 0.25  # between two looks at the parent; a timer, because forks of a process with threads are unsafe

PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h: the signal this process gets when its parent dies

_PARENT, _SELF = os.getppid(), os.getpid()  # as the forkserver imports this

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before the fork, so that a child only calls

_tied = False  # whether this process is a rank


def _check(*_: object) -> None:
    if os.getppid() != _PARENT:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_parent() -> None:
    """At once, whatever is being done, an import in C too (Linux; elsewhere the timer and the ranks' thread alone)."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _tie_rank() -> None:
    """In a rank, right after its fork: it dies when the forkserver does. What a rank forks is the rank's own affair."""
    global _tied
    if _tied:
        return
    _tied = True
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # timers are not inherited, handlers are
    sys.excepthook = _in_one_line
    _die_with_parent()
    if os.getppid() != _SELF:
        os._exit(1)


def _in_one_line(kind: type[BaseException], error: BaseException, _: object) -> None:
    """Of a rank that does not come to its own code: a parent that ends meanwhile takes away what it was given."""
    print(f"a process was not started: {kind.__name__}: {error}", file=sys.stderr, flush=True)


signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides what it means

_die_with_parent()

signal.signal(signal.SIGALRM, _check)

signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS, CHECK_SECONDS)

os.register_at_fork(after_in_child=_tie_rank)
