"""The syntax of overrides: arguments as Hydra takes them, its errors in one line, and repeated runs."""

import re
from collections.abc import Sequence

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from harness.config.values import ConfigValues
from harness.util.text import one_line


def composition_error(error: Exception) -> str:
    """Return why a configuration cannot be composed, in one line that names the key and the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is not known: choose {', '.join(sorted(error.options))}"
    several_values = re.search(r"Ambiguous value for argument '(.*?)'", str(error))
    if several_values:
        return f"{several_values[1]} has several values: add -m to run every combination"
    cause = error.__cause__ or error.__context__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key} is not a key of the configuration: `harness --cfg job` prints all of them"
    return one_line(str(error).split("\nSee https", maxsplit=1)[0])


LIST_KEYS = ("retry", "stop_after")  # keys that take several values: a comma there does not make a sweep


def normalize_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra takes them: -m may stand anywhere, and lists need no brackets."""
    multirun_first = sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))
    return [as_list_override(argument) for argument in multirun_first]


def as_list_override(argument: str) -> str:
    """Return an override with brackets around the value of a key that takes several."""
    key, _, value = argument.partition("=")
    return f"{key}=[{value}]" if key in LIST_KEYS and value and not value.startswith("[") else argument


def expand_repeats(values: ConfigValues) -> list[ConfigValues]:
    """Return the values of each repeat of a combination; an invalid count yields one, which the schema then rejects."""
    first, repeats = values.get("repeat"), values.get("repeats")
    if type(first) is not int or type(repeats) is not int or repeats < 1:
        return [values]
    return [values | {"repeat": first + index, "repeats": 1} for index in range(repeats)]
