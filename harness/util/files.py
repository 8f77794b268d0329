"""Files that are written whole or not at all."""

import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]  # an object of JSON, where it is read from or written to a file or another process


def atomic_write_text(path: Path, text: str) -> None:
    """Write text in UTF-8 with atomic_write_bytes; lone surrogates are escaped."""
    atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Create or replace a file in one step, so that even after a crash readers see it whole, old or new."""
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
    """Write a value as JSON with atomic_write_text; numbers that are not finite become null, as JSON has none."""
    atomic_write_text(path, json.dumps(replace_non_finite(value), indent=2, allow_nan=False) + "\n")


def read_json_object(path: Path) -> JsonObject:
    """Return the object in a file of JSON; an empty one if there is no such file, or none that is whole."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def replace_non_finite(value: Any) -> Any:
    """Return a copy of nested plain values in which NaN and infinities are None and tuples are lists."""
    if isinstance(value, dict):
        return {key: replace_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
