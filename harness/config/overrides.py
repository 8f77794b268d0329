"""What the command line means: arguments as Hydra takes them, its complaints in one line, repeated runs."""

from collections.abc import Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from harness.util.text import one_line


def composition_error(error: Exception) -> str:
    """A configuration that cannot be composed, in one line that names the key and the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is not known: choose {', '.join(sorted(error.options))}"
    cause = error.__cause__ or error.__context__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key} is not a key of the configuration: see python -m harness --cfg job"
    return one_line(str(error).split("\nSee https", maxsplit=1)[0])


LIST_KEYS = ("retry", "stop_after")  # keys whose values can be several: commas there make no sweep


def normalize_overrides(given: Sequence[str]) -> list[str]:
    """The command line as Hydra takes it: -m may stand anywhere, and keys of several values need no brackets."""
    found = sorted(given, key=lambda argument: argument not in ("-m", "--multirun"))
    return [as_list_override(argument) for argument in found]


def as_list_override(argument: str) -> str:
    key, _, value = argument.partition("=")
    return f"{key}=[{value}]" if key in LIST_KEYS and value and not value.startswith("[") else argument


def expand_repeats(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The values of each run of a combination. Those that cannot be counted stay one, for RunConfig to complain of."""
    first, repeats = values.get("repeat"), values.get("repeats")
    if type(first) is not int or type(repeats) is not int or repeats < 1:
        return [values]
    return [values | {"repeat": first + index, "repeats": 1} for index in range(repeats)]
