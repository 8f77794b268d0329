"""The one kind of error that is the user's to mend: shown as a single line, never as a traceback."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """A value that cannot work. The message names the dotted key, its value, the rule and the remedy."""


def one_line(message: object) -> str:
    """Any message as a single line, white space folded, for a table cell or a terminal."""
    return " ".join(str(message).split())


def printable(text: object) -> str:
    """Any text as one line without characters that steer a terminal or a parser."""
    line = one_line(text)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def unwritable(error: OSError) -> str:
    """What the operating system says of a file, in one line."""
    return f"{error.filename or 'a file'} cannot be written: {error.strerror or error}"


def exit_status(command: Callable[[], None]) -> int:
    """0, or 2 for a user's mistake or a file that cannot be written, said in one line."""
    try:
        command()
    except UserError as error:
        print(printable(error), file=sys.stderr)
        return 2
    except OSError as error:
        print(printable(unwritable(error)), file=sys.stderr)
        return 2
    return 0
