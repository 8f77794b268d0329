"""The signals that end a command, which writes its table and report on the first one."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_ignored(number: signal.Signals) -> bool:
    """Return whether a signal is ignored on purpose: SIGHUP under nohup, SIGINT in a background job.

    SIGTERM is never: the `trap '' TERM` of a batch script is for the script, and its commands inherit it.
    """
    return number != signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN


def set_handlers() -> None:
    """Let the signals that end a command raise KeyboardInterrupt."""
    for number in HANDLED:
        if not is_ignored(number):
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: FrameType | None) -> None:
    ignore_all_but_sigint()
    raise KeyboardInterrupt


def ignore_all_but_sigint() -> None:
    """Ignore further signals, because a closed terminal sends several SIGHUP; Ctrl-C still ends the command at once."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_unrecorded() -> None:
    """Let SIGTERM and SIGHUP end a command that has recorded nothing as they end any program, after a line about it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if not is_ignored(number):
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    line = f"\nharness: ended by {signal.Signals(number).name} before a run was recorded\n"
    with suppress(OSError):
        os.write(2, line.encode())  # not by a stream, which may be in the middle of a line
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(signal.Signals(number))


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the handlers of these signals when the block ends."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
