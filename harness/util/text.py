"""Text for the user: messages reduced to one printable line, counts with their nouns, enumerations and durations."""

from collections.abc import Sequence


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
