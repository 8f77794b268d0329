"""The border to Hydra: the defaults that composition starts from, where files lie, and plain values of the result."""

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config.command import CommandConfig
from harness.config.devices import with_datasheet
from harness.config.from_dict import ConfigValues, default_of, is_group
from harness.config.locations import PACKAGED_CONF, PRESETS, files_in, user_folder
from harness.config.mistakes import VALUES, choices_of, group_names, known_keys, unknown_choice, unknown_key
from harness.config.model_files import names_model
from harness.config.schema import RunConfig
from harness.util.text import UserError, one_line

LISTS = {"retry", "stop_after"}  # keys of several values, which need no brackets


def dataclass_defaults(cls: type) -> dict[str, Any]:
    """Return a group's keys that have a default, so that the command line may set those that no YAML file mentions."""
    hints = typing.get_type_hints(cls)
    defaults = {
        entry.name: dataclass_defaults(hints[entry.name]) if is_group(hints[entry.name]) else default_of(entry)
        for entry in dataclasses.fields(cls)
        if entry.init
    }
    return {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}


def register_resolvers() -> None:
    """Register with Hydra the defaults of the dataclasses, our resolvers, and where configuration files lie.

    conf/config.yaml starts from the defaults under the name `defaults_of_groups`; ${harness.most:2,${cluster.nodes}} is
    the larger of both.
    """
    OmegaConf.register_new_resolver("harness.most", max, replace=True)
    defaults = OmegaConf.create(dataclass_defaults(CommandConfig) | dataclass_defaults(RunConfig))
    for part in (defaults.strategy, defaults.tracking):
        OmegaConf.set_struct(part.options, False)  # settings that only the engine or the tracker knows
    OmegaConf.set_struct(defaults.cluster, False)  # its hardware is null, or has the keys that its file gives
    ConfigStore.instance().store(name="defaults_of_groups", node=defaults)
    Plugins.instance().register(HarnessSearchPath)
    Plugins.instance().register(NamedModels)


class HarnessSearchPath(SearchPathPlugin):
    """A Hydra plugin that searches the current folder's conf/ and sweeps/ before the packaged ones.

    A conf/config.yaml that does not start from our defaults is another project's: then the packaged files come first.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add our folders to Hydra's."""
        user = user_folder("conf")
        if user is not None:
            main = user / "config.yaml"
            is_ours = not main.exists() or "defaults_of_groups" in main.read_text(errors="replace")
            add = search_path.prepend if is_ours else search_path.append
            add("harness-user", f"file://{user}")
        if user_folder("sweeps") is not None:
            search_path.append("harness-user-sweeps", f"file://{Path.cwd()}")
        search_path.append("harness-sweeps", f"file://{PRESETS}")
        search_path.append("harness-models", f"{NamedModels.scheme()}://")


class NamedModels(ConfigSource):
    """A Hydra source of configurations: `model=NAME` of a file, a folder or a model in the hub is model=hf with it."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of its search path."""
        return "models"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the values of model=hf with the path after the group."""
        values = OmegaConf.load(files_in("model")["hf"])
        values.path = config_path.partition("/")[2]
        return ConfigResult(self.provider, self.full_path(), values, {"package": "model"})

    def available(self) -> bool:
        """Return that it is there."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return that it adds no group."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Return whether a configuration is that of a named model."""
        return names_model(config_path.replace("/", "=", 1))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return nothing: its names cannot be listed."""
        return []


@contextmanager
def composing() -> Iterator[None]:
    """Raise UserError for what Hydra and OmegaConf cannot compose or resolve within the block."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(composition_error(error)) from None


def compose_values(*overrides: str, primary: str = "config") -> ConfigValues:
    """Return the values that a command line with these overrides has. Raises UserError for a mistake in them.

    `primary` is the file in conf/ that composition starts from.
    """
    return to_container(_composed(overrides, primary))


def sweeper_params(*overrides: str, primary: str = "config") -> dict[str, str]:
    """Return the values that a sweep file gives its keys, as a command line would. Raises UserError for a mistake."""
    sweeper = _composed(overrides, primary, with_hydra=True).hydra.sweeper
    params: Any = OmegaConf.to_container(sweeper.params or OmegaConf.create({}))
    return {str(key): str(value) for key, value in params.items()}


def _composed(overrides: Sequence[str], primary: str, with_hydra: bool = False) -> Any:
    """Return what Hydra composes, with its own configuration under `hydra` if it is wanted."""
    register_resolvers()
    with composing(), hydra.initialize_config_dir(str(PACKAGED_CONF), version_base="1.3"):
        return hydra.compose(primary, list(overrides), return_hydra_config=with_hydra)


def to_container(composed: Any) -> dict[str, Any]:
    """Return what Hydra composed as plain values, every interpolation resolved, and datasheets in the place of null.

    Raises UserError where one cannot be resolved, and for a device without a datasheet.
    """
    with composing():
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    if isinstance(values.get("cluster"), dict):
        values["cluster"] = with_datasheet(values["cluster"])
    for key in LISTS & values.keys():
        if isinstance(values[key], str | int | float):
            values[key] = [part.strip() for part in str(values[key]).split(",")]
    return values


def composition_error(error: Exception) -> str:
    """Return why a configuration cannot be composed, in one line that names the key and the remedy."""
    if isinstance(error, YAMLError):
        return f"a configuration file is not valid YAML: {one_line(error)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group in (*group_names(), *VALUES):
            return unknown_choice(group, name)
        return f"{group}={name} is not known: choose {', '.join(sorted(error.options))}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        rest = "a sweep is sweeps=NAME, and files of other programs are for harness import FILE"
        return f"there is no {error.missing_cfg_file}.yaml in conf/: {rest}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    key = cause.full_key if isinstance(cause, OmegaConfBaseException) and isinstance(error, HydraException) else None
    if not key:
        return one_line(str(error).split("\nSee https", maxsplit=1)[0])
    if key not in known_keys():
        return unknown_key(key, "")
    group = key.partition(".")[0]
    choices = ", ".join(f"{group}={choice}" for choice in choices_of(group) if choice != "auto")
    return f"{key} is not part of the chosen {group}: choose one of {choices} beside it"


def expand_repeats(values: ConfigValues) -> list[ConfigValues]:
    """Return the values of each repeat of a combination; an invalid count yields one, which the schema then rejects."""
    first, repeats = values.get("repeat"), values.get("repeats")
    if type(first) is not int or type(repeats) is not int or repeats < 1:
        return [values]
    return [values | {"repeat": first + index, "repeats": 1} for index in range(repeats)]
