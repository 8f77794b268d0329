"""What the command line means: Hydra's complaints in one line, and how many runs a sweep has."""

from collections.abc import Mapping, Sequence

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


def sweep_size(arguments: Sequence[str], parameters: Mapping[str, object] | None) -> int:
    """How many combinations Hydra's basic sweeper will make of the sweep's parameters and the command line."""
    stated = [f"{key}={value}" for key, value in (parameters or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*stated, *(a for a in arguments if "=" in a)])
    size = 1
    for override in overrides:
        if override.is_sweep_override():
            size *= len(list(override.sweep_string_iterator()))
    return size
