"""Sizes of memory as users write and read them: 24GB is decimal, 24GiB binary."""

import re
from decimal import Decimal
from typing import Annotated

from harness.util.text import UserError

BINARY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}  # largest first

DECIMAL = {"GB": 10**9, "MB": 10**6, "KB": 10**3}

UNITS = BINARY | DECIMAL | {"B": 1, "": 1}

_MAX_BYTES = 2**63 - 1  # allocators count in 64 bits


def parse_bytes(text: str | int | float, key: str = "") -> int:
    """Return the bytes of a size such as 108MiB, 1.5GB or 4096; with a unit, a fraction of a byte is dropped.

    Raises UserError for anything else and for sizes below 1, naming the key if there is one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip(), re.ASCII)
    unit = UNITS.get(match[2], 0) if match else 0
    size = Decimal(match[1]) * unit if match else Decimal(0)
    if 1 <= size <= _MAX_BYTES and (size == int(size) or unit > 1):
        return int(size)
    choice = f"choose a number with {', '.join((*BINARY, *DECIMAL, 'B'))}, or of bytes alone"
    if match and not unit and (letter := match[2][:1].upper()) in ("G", "M", "K"):
        choice = f"did you mean {match[1]}{letter}iB or {match[1]}{letter}B?"
    setting = f"{key}={text}" if key else str(text)
    raise UserError(f"{setting} is not a size of 1 byte or more: {choice}")


Size = Annotated[str | int | float, parse_bytes]


def format_bytes(size_bytes: float) -> str:
    """Return a size for a sentence, in the largest binary unit that is not larger than it: 108.0 MiB."""
    for unit, size in BINARY.items():
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"
