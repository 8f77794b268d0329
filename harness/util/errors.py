"""The one kind of error that is the user's to mend: shown as a single line, never as a traceback."""

import sys
from collections.abc import Callable

from harness.util.text import sanitize


class UserError(Exception):
    """A value that cannot work. The message names the dotted key, its value, the rule and the remedy."""


def os_error_text(error: OSError) -> str:
    """What the operating system says of a file, in one line."""
    return f"{error.filename or 'a file'} cannot be written: {error.strerror or error}"


def run_command(command: Callable[[], None]) -> int:
    """0, or 2 for a user's mistake or a file that cannot be written, said in one line."""
    try:
        command()
    except UserError as error:
        print(sanitize(error), file=sys.stderr)
        return 2
    except OSError as error:
        print(sanitize(os_error_text(error)), file=sys.stderr)
        return 2
    return 0
