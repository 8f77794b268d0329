"""Errors that the user can fix, which are shown as a single line and never as a traceback."""

import os
import signal
import sys
from collections.abc import Callable

from harness.util.text import sanitize


class UserError(Exception):
    """An error that the user can fix. The message names the dotted key, its value, the rule and the remedy."""


def os_error_text(error: OSError) -> str:
    """Return one line that names the file and the operating system's reason."""
    return f"{error.filename or 'a file'} cannot be written: {error.strerror or error}"


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code: its own, 0 for None, or 2 after a UserError or an OSError as one line.

    Without a message, as shells do, return 128 + SIGPIPE if the reader of the output, such as `head`, has closed it,
    and 128 + SIGINT after Ctrl-C.
    """
    try:
        status = command() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        print(sanitize(os_error_text(error) if isinstance(error, OSError) else error), file=sys.stderr)
        return 2
    return status
