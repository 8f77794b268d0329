"""The border to Hydra: the defaults that composition starts from, where files lie, and plain values of the result."""

import dataclasses
import functools
import typing
from pathlib import Path
from typing import Any, cast

from harness.config.command import CommandConfig
from harness.config.locations import PACKAGED_CONF, PRESETS, user_conf, user_sweeps
from harness.config.schema import RunConfig
from harness.config.values import ConfigValues
from harness.util.errors import UserError
from harness.util.text import one_line


def dataclass_defaults(cls: type) -> dict[str, Any]:
    """Return a group's keys that have a default, so that the command line may set those that no YAML file mentions."""
    defaults: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        entry = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            defaults[name] = dataclass_defaults(hint)
        elif entry.default is not dataclasses.MISSING:
            defaults[name] = entry.default
        elif entry.default_factory is not dataclasses.MISSING:
            defaults[name] = entry.default_factory()
    return defaults


def register_resolvers() -> None:
    """Register with Hydra the defaults of the dataclasses, our resolvers, and where configuration files lie.

    conf/config.yaml starts from the defaults under the name `defaults_of_groups`; ${harness.most:2,${cluster.nodes}} is
    the larger of both.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("harness.most", max, replace=True)
    defaults = OmegaConf.create(dataclass_defaults(CommandConfig) | dataclass_defaults(RunConfig))
    OmegaConf.set_struct(defaults.strategy.options, False)  # an engine's settings, which only the engine knows
    ConfigStore.instance().store(name="defaults_of_groups", node=defaults)
    Plugins.instance().register(_search_path_plugin())


@functools.cache
def _search_path_plugin() -> Any:
    """Return a Hydra plugin that searches the current folder's conf/ and sweeps/ before the packaged ones.

    A conf/config.yaml that does not start from our defaults is another project's: then the packaged files come first.
    """
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class HarnessSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            user = user_conf()
            if user is not None:
                main = user / "config.yaml"
                is_ours = not main.exists() or "defaults_of_groups" in main.read_text(errors="replace")
                add = search_path.prepend if is_ours else search_path.append
                add("harness-user", f"file://{user}")
            if user_sweeps() is not None:
                search_path.append("harness-user-sweeps", f"file://{Path.cwd()}")
            search_path.append("harness-sweeps", f"file://{PRESETS}")

    return HarnessSearchPath


def compose_values(*overrides: str, primary: str = "config") -> ConfigValues:
    """Return the values that a command line with these overrides has. Raises UserError for a mistake in them.

    `primary` is the file in conf/ that composition starts from.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from harness.config.overrides import composition_error

    register_resolvers()
    try:
        with hydra.initialize_config_dir(str(PACKAGED_CONF), version_base="1.3"):
            composed = hydra.compose(primary, list(overrides))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(composition_error(error)) from None
    return cast("ConfigValues", to_container(composed))


def sweeper_params(*overrides: str, primary: str = "config") -> dict[str, str]:
    """Return the values that a sweep file gives its keys, as a command line would. Raises UserError for a mistake."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from harness.config.overrides import composition_error

    register_resolvers()
    try:
        with hydra.initialize_config_dir(str(PACKAGED_CONF), version_base="1.3"):
            composed = hydra.compose(primary, list(overrides), return_hydra_config=True)
            params: Any = OmegaConf.to_container(composed.hydra.sweeper.params or OmegaConf.create({}))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(composition_error(error)) from None
    return {str(key): str(value) for key, value in params.items()}


def to_container(composed: Any) -> dict[str, Any]:
    """Return what Hydra composed as plain values, every interpolation resolved.

    Raises UserError where one cannot be resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(one_line(error)) from None
    return values
