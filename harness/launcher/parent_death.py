"""The forkserver's first import, which makes the forkserver and the ranks that it forks die with the parent.

Each rank also has a thread for this (harness.launcher.rank_entry), but that starts only when the rank runs our code. If
the parent were killed while its ranks are being started, these and the forkserver's imports would run on for seconds.
"""

import os
import signal
import sys

from harness.util.parent_death import PARENT_VARIABLE, die_with_parent

CHECK_SECONDS = 0.25  # between checks of the parent by a timer, not a thread: forking with threads is unsafe

# Process ids of the forkserver's parent and of the forkserver. The parent may have died before this import, and the
# forkserver has another one then.
_PARENT, _SELF = int(os.environ.get(PARENT_VARIABLE, os.getppid())), os.getpid()

_is_rank = False  # whether this process is a rank


def _check(*_: object) -> None:
    if os.getppid() != _PARENT:
        os.kill(os.getpid(), signal.SIGKILL)


def _bind_rank() -> None:
    """Make a rank die with the forkserver. This runs right after its fork; processes that a rank forks are exempt."""
    global _is_rank
    if _is_rank:
        return
    _is_rank = True
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # timers are not inherited, handlers are
    sys.excepthook = _print_one_line
    die_with_parent()
    if os.getppid() != _SELF:
        os._exit(1)


def _print_one_line(error_type: type[BaseException], error: BaseException, _: object) -> None:
    """Print one line instead of a traceback: a hook for processes that die before our code runs.

    The usual cause is that the parent has exited and closed their pipes.
    """
    print(f"a rank's process did not start: {error_type.__name__}: {error}", file=sys.stderr, flush=True)


signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent handles it

die_with_parent()

signal.signal(signal.SIGALRM, _check)

signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS, CHECK_SECONDS)

os.register_at_fork(after_in_child=_bind_rank)
