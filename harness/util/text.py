"""Text for the user: errors that they can fix, messages of one printable line, counts, durations and sizes.

Sizes of memory are as users write and read them: 24GB is decimal, 24GiB binary.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Annotated, Any, TextIO


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
        discard_output(sys.stdout)  # Python flushes once more when it exits
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        print(sanitize(os_error_text(error) if isinstance(error, OSError) else error), file=LastingStream(sys.stderr))
        return 2
    return status


def discard_output(stream: TextIO) -> None:
    """Let everything that is still written to a stream go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LastingStream:
    """A stream for messages, whose text goes nowhere from the moment when its terminal or pipe is closed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return self.stream.write(text)
        except OSError:
            discard_output(self.stream)
            return 0

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self.stream.flush()
        except OSError:
            discard_output(self.stream)


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
    """Return a duration to read: 40 s, 12 min, 3.5 h, 12.0 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    if hours < 1.5:
        return f"{seconds / 60:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"


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


BINARY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}  # largest first

DECIMAL = {"GB": 10**9, "MB": 10**6, "KB": 10**3}

UNITS = BINARY | DECIMAL | {"B": 1, "": 1}

_MAX_BYTES = 2**63 - 1  # allocators count in 64 bits


def parse_bytes(text: str | int | float, key: str = "") -> int:
    """Return the bytes of a size such as 108MiB, 1.5GB or 4096; with a unit, a fraction of a byte is dropped.

    Raises UserError for anything else, for sizes below 1 byte, and for a number below 1,024 without a unit, which is
    meant in another one. It names the key if there is one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip(), re.ASCII)
    unit = UNITS.get(match[2], 0) if match else 0
    size = Decimal(match[1]) * unit if match else Decimal(0)
    is_bare = bool(match and not match[2])
    if (2**10 if is_bare else 1) <= size <= _MAX_BYTES and (size == int(size) or unit > 1):
        return int(size)
    choice = f"choose a number with {', '.join((*BINARY, *DECIMAL, 'B'))}, or of bytes alone"
    letter = "G" if is_bare and size else match[2][:1].upper() if match and not unit else ""
    if match and letter in ("G", "M", "K"):
        choice = f"did you mean {match[1]}{letter}iB or {match[1]}{letter}B?"
    setting = f"{key}={text}" if key else str(text)
    raise UserError(f"{setting} is not a size of memory: {choice}")


Size = Annotated[str | int | float, parse_bytes]


def format_bytes(size_bytes: float) -> str:
    """Return a size for a sentence, in the largest binary unit that is not larger than it: 108.0 MiB."""
    for unit, size in BINARY.items():
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"
