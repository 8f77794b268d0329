"""Sizes of memory as they are written and read: 24GB is decimal, 24GiB binary."""

import re
from decimal import Decimal

from harness.util.errors import UserError

BINARY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}  # the largest first

DECIMAL = {"GB": 10**9, "MB": 10**6, "KB": 10**3}

UNITS = BINARY | DECIMAL | {"B": 1, "": 1}

_MOST = 2**63 - 1  # what counts them has 64 bits


def parse_bytes(text: str | int | float, key: str = "") -> int:
    """The bytes of a size such as 108MiB, 1.5GB or 4096; a fraction of a byte is left out where there is a unit.

    Raises UserError, under the key if one is given, for anything else and for sizes below 1.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip(), re.ASCII)
    size = Decimal(found[1]) * UNITS.get(found[2], 0) if found else Decimal(0)
    is_whole = size == int(size) or (found is not None and UNITS.get(found[2], 0) > 1)
    if not (1 <= size <= _MOST and is_whole):
        named = f"{key}={text}" if key else str(text)
        units = ", ".join((*BINARY, *DECIMAL, "B"))
        raise UserError(f"{named} is not a size of 1 byte or more: choose a number with {units}, or of bytes alone")
    return int(size)


def format_bytes(size_bytes: float) -> str:
    """For a sentence, in the largest binary unit of which it is 1 or more: 108.0 MiB."""
    for unit, size in BINARY.items():
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"
