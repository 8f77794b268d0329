"""Secrets that must not be written to a file or sent: passwords within URLs, and values of the environment."""

import os
import re
from collections.abc import Callable
from typing import Any

_SECRET_WORDS = "SECRET|TOKEN|CREDENTIAL|JWT|BEARER"

# Names of environment variables whose values are secrets for certain: these are replaced wherever they occur in a text.
_SECRET_NAME = re.compile(f"{_SECRET_WORDS}|API_?KEY|ACCESS_?KEY|PASSW", re.IGNORECASE)

# Names that may denote a secret: such variables are left out of a record, as a lost setting is better than a leak.
_POSSIBLE_SECRET = re.compile(f"{_SECRET_WORDS}|KEY|PASS|PWD|AUTH|COOKIE", re.IGNORECASE)

_MIN_SECRET_LENGTH = 12  # characters: a shorter value may be a common word

_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/\s@'\"]*:[^/\s@'\"]+(?=@)")  # user:password

_URL_WITH_USER_OR_QUERY = re.compile(r"//[^/\s]*@|://\S*\?")

_REPLACEMENT = "[secret]"


def redacted(value: Any) -> Any:
    """Return a copy of nested plain values in which every secret is replaced. Keys of dicts stay as they are."""
    secrets = _environment_secrets()

    def without_secrets(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, _REPLACEMENT)
        return _PASSWORD_IN_URL.sub(_REPLACEMENT, text)

    return map_texts(value, without_secrets)


def keys_holding_secrets(value: Any, key: str = "") -> list[str]:
    """Return the dotted keys of nested plain values whose value holds a secret."""
    if isinstance(value, dict):
        return [
            secret_key
            for name, entry in value.items()
            for secret_key in keys_holding_secrets(entry, f"{key}.{name}" if key else str(name))
        ]
    return [key] if redacted(value) != (list(value) if isinstance(value, tuple) else value) else []


def may_hold_secret(name: str, value: str) -> bool:
    """Return whether an environment variable may hold a secret, by its name or its value."""
    return bool(
        _POSSIBLE_SECRET.search(name) or _POSSIBLE_SECRET.search(value) or _URL_WITH_USER_OR_QUERY.search(value)
    )


def _environment_secrets() -> list[str]:
    """Return the secrets in the environment, longest first, so that one that contains another is replaced whole.

    A path is never a secret: variables often name the file that holds one.
    """
    secrets = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LENGTH and not value.startswith(("/", "~"))
    }
    return sorted(secrets, key=len, reverse=True)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of nested plain values in which every text is changed, and tuples are lists."""
    if isinstance(value, dict):
        return {key: map_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value
