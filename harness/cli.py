"""What the command line means: Hydra's complaints in one line, and how many runs it asks for."""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from harness.errors import one_line


def composition_error(error: Exception) -> str:
    """A configuration that cannot be composed, in one line that names the key and the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is not known: choose {', '.join(sorted(error.options))}"
    cause = error.__cause__ or error.__context__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key} is not a key of the configuration: see python -m harness --cfg job"
    return one_line(str(error).split("\nSee https", maxsplit=1)[0])


def sweep_size(arguments: Sequence[str], parameters: Mapping[str, object] | None, repeats: int) -> int:
    """How many runs Hydra's basic sweeper makes of the sweep's parameters and the command line.

    repeats: how often the combination at hand is run; in a sweep of `repeats` itself each has its own number.
    """
    stated = [f"{key}={value}" for key, value in (parameters or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*stated, *(a for a in arguments if "=" in a)])
    combinations = 1
    for override in overrides:
        if override.is_sweep_override():
            choices = list(override.sweep_string_iterator())
            if override.key_or_group == "repeats":
                repeats = sum(max(1, int(choice)) if choice.isdecimal() else 1 for choice in choices)
            else:
                combinations *= len(choices)
    return combinations * repeats


def each_repeat(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The values of each run of a combination. Those that cannot be counted stay one, for RunConfig to complain of."""
    first, repeats = values.get("repeat"), values.get("repeats")
    if type(first) is not int or type(repeats) is not int or repeats < 1:
        return [values]
    return [values | {"repeat": first + index, "repeats": 1} for index in range(repeats)]
