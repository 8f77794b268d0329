"""Text for the user: errors that they can fix, messages of one printable line, counts, enumerations and durations."""

import os
import signal
import sys
from collections.abc import Callable, Sequence


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


def one_line(message: object) -> str:
    """Return any message as a single line with white space folded, for a table cell or a terminal."""
    return " ".join(str(message).split())


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun, such as 1 run or 2 runs."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def join_words(parts: Sequence[str], word: str = "and") -> str:
    """Return an enumeration: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {word} {parts[-1]}"


def format_duration(seconds: float) -> str:
    """Return a duration to read: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def sanitize(text: object) -> str:
    """Return any text as one line in which every unprintable character is replaced.

    Such characters could steer a terminal or a parser.
    """
    return printable(one_line(text))


def printable(line: str) -> str:
    """Return a line, whose spaces stay, with every unprintable character replaced."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
