"""The names by which other programs and papers know what the command line calls otherwise: data for `did you mean`."""

import re
import tomllib
from pathlib import Path
from typing import Any

BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def canonical(name: str) -> str:
    """Return the form of a name in which spellings are compared."""
    return re.sub(r"[-./\s]+", "_", name.strip().lower()).strip("_")


def _by_name(names: dict[str, list[str]]) -> dict[str, str]:
    return {name: meant for meant, known in names.items() for name in known}


KEYS = _by_name(_TABLES["keys"])  # what to type, with `{}` for the value
NO_KEYS = _by_name(_TABLES["no_keys"])  # sentences
VALUES = {
    group: {name: tuple(meant.split(", ")) for name, meant in _by_name(names).items()}
    for group, names in _TABLES["values"].items()
}
KEY_VALUES = {key: _by_name(names) for key, names in _TABLES["key_values"].items()}
