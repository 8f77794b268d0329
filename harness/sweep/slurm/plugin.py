"""TODO harness.sweep.slurm.plugin."""

import importlib
import sys
from types import ModuleType
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins


class SlurmLauncher(BasicLauncher):
    """What conf/hydra/launcher/submitit_slurm.yaml names: composes jobs as ever; Slurm below takes the keys."""

    __module__ = "hydra_plugins.harness"

    def __init__(self, **_: Any) -> None:
        super().__init__()


def register_launcher() -> None:
    """Hydra takes launchers of the package hydra_plugins alone: there this one is found too."""
    try:
        package = importlib.import_module("hydra_plugins")
    except ImportError:  # no plugin is installed
        package = sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
        package.__path__ = []
    package.harness = sys.modules[__name__]  # type: ignore[attr-defined]
    Plugins.instance().register(SlurmLauncher)


def is_selected(launcher: dict[str, Any]) -> bool:
    return str(launcher.get("_target_")).endswith(SlurmLauncher.__name__)
