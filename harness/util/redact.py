"""What must not be written down or sent: passwords within URLs, and secrets that the environment holds."""

import os
import re
from typing import Any

# Of the environment's variables, those whose values are secrets by their names. Neither a path nor a short word is one.
_SECRET_NAME = re.compile("API_?KEY|ACCESS_?KEY|SECRET|TOKEN|PASSW|CREDENTIAL|JWT|BEARER", re.IGNORECASE)

_SHORTEST = 12  # characters

_IN_URL = re.compile(r"(?<=://)[^/\s@'\"]*:[^/\s@'\"]+(?=@)")  # user:password

_INSTEAD = "[secret]"


def redacted(value: Any) -> Any:
    """Plain values, or text, with every secret replaced. Keys of groups are left as they are."""
    return _redacted(value, _secrets())


def keys_holding_secrets(value: Any, key: str = "") -> list[str]:
    """The dotted keys of plain values under which a secret stands."""
    if isinstance(value, dict):
        return [
            found
            for name, entry in value.items()
            for found in keys_holding_secrets(entry, f"{key}.{name}" if key else str(name))
        ]
    return [key] if redacted(value) != (list(value) if isinstance(value, tuple) else value) else []


def _secrets() -> list[str]:
    """Longest first, so that none is left of which another is a part."""
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and not value.startswith(("/", "~"))
    }
    return sorted(found, key=len, reverse=True)


def _redacted(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(entry, secrets) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(entry, secrets) for entry in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, _INSTEAD)
    return _IN_URL.sub(_INSTEAD, value)
