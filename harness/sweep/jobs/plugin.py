"""The Hydra launcher behind `hydra/launcher=slurm` and the like: Hydra composes the jobs, and JobExecutor submits them.

Slurm's has submitit's keys, but does not use submitit. Submitit pickles a function for every job into a folder of its
own and polls there for the pickled result, while here a job is one command that reads a file of plain values, survives
a requeue, and is found again by any later command. For the same reason Ray's is not hydra-ray-launcher.
"""

import sys
from types import ModuleType
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins

from harness.config.from_dict import GroupValues

PACKAGE = "hydra_plugins.harness"  # Hydra accepts launchers of the package hydra_plugins alone


class JobLauncher(BasicLauncher):
    """The launcher that files in conf/hydra/launcher name; it composes every job in this process as by default."""

    __module__ = PACKAGE

    def __init__(self, **_: Any) -> None:
        super().__init__()


def register_launcher() -> None:
    """Register the launcher with Hydra, in the package that Hydra accepts launchers of."""
    plugins = Plugins.instance()  # it imports the package if any other plugin is installed
    package: Any = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    package.__path__ = getattr(package, "__path__", [])
    package.harness = sys.modules[__name__]
    plugins.register(JobLauncher)


def is_selected(launcher: GroupValues) -> bool:
    """Return whether these keys of hydra.launcher are those of our launcher."""
    return launcher.get("_target_") == f"{PACKAGE}.{JobLauncher.__name__}"
