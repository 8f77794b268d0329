"""A line in the terminal about what a command is doing until it shows something of its own."""

import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

PLAIN_SECONDS = 10.0  # between two lines where there is no terminal

_CLEAR_LINE = "\r\x1b[2K"


class Notice:
    """A line on standard error that the next one replaces; without a terminal, at most one every PLAIN_SECONDS."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.printed_at = time.monotonic()

    def show(self, text: str) -> None:
        """Show this text in the place of the one before."""
        if self.is_terminal:
            print(f"{_CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.printed_at >= PLAIN_SECONDS:
            self.printed_at = time.monotonic()
            print(text, file=sys.stderr, flush=True)


@contextmanager
def showing(text: str) -> Iterator[Notice]:
    """Show a notice during the block, and remove it after."""
    notice = Notice()
    notice.show(text)
    try:
        yield notice
    finally:
        if notice.is_terminal:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


def import_slowly(module: str, text: str) -> ModuleType:
    """Return a module whose import takes seconds, and show this text meanwhile.

    Ctrl-C ends the process without a traceback while modules are imported.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with showing(text):
            return importlib.import_module(module)
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
