"""TODO harness.util.files."""

import json
import math
import os
import secrets
from pathlib import Path
from typing import Any


def atomic_write_text(path: Path, text: str) -> None:
    atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Replace a file, or make it, in one step: whoever reads it, even after a crash, sees the old or the new whole."""
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def atomic_write_json(path: Path, value: Any) -> None:
    """As atomic_write_text; a number that is not finite becomes null, for JSON has none."""
    atomic_write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
