"""Errors of Hydra as one line for the user, and the repeats of a combination."""

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config.mistakes import choices_of, group_names, known_keys, unknown_choice, unknown_key
from harness.config.values import ConfigValues
from harness.util.text import one_line


def composition_error(error: Exception) -> str:
    """Return why a configuration cannot be composed, in one line that names the key and the remedy."""
    if isinstance(error, YAMLError):
        return f"a configuration file is not valid YAML: {one_line(error)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group in group_names():
            return unknown_choice(group, name)
        return f"{group}={name} is not known: choose {', '.join(sorted(error.options))}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and isinstance(error, HydraException):
        return _unknown_key_error(cause.full_key)
    return one_line(str(error).split("\nSee https", maxsplit=1)[0])


def _unknown_key_error(key: str) -> str:
    """Return why a key cannot be set that the composed configuration does not have."""
    group = key.partition(".")[0]
    if key in known_keys():
        choices = ", ".join(f"{group}={choice}" for choice in choices_of(group) if choice != "auto")
        return f"{key} is not part of the chosen {group}: choose one of {choices} beside it"
    return unknown_key(key, "")


def expand_repeats(values: ConfigValues) -> list[ConfigValues]:
    """Return the values of each repeat of a combination; an invalid count yields one, which the schema then rejects."""
    first, repeats = values.get("repeat"), values.get("repeats")
    if type(first) is not int or type(repeats) is not int or repeats < 1:
        return [values]
    return [values | {"repeat": first + index, "repeats": 1} for index in range(repeats)]
