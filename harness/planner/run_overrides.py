"""The overrides by which a layout of a search is run: the nearest strategy preset, and what differs. No torch."""

import shlex
from collections.abc import Sequence
from functools import cache
from typing import Any

import yaml

from harness.config.checkpointing import CheckpointingConfig
from harness.config.from_dict import GroupValues
from harness.config.locations import files_in
from harness.config.schema import RunConfig
from harness.config.strategy import StrategyConfig

SEARCH = "search"  # the strategy that stands for all of them

# The library, its settings, and whether these are the papers': of a preset as it is.
_OF_LIBRARY = ("engine", "options", "literature")

# The settings that a search chooses, which a run's command line has from its answer; a stack is a plan's alone.
_CHOSEN = ("strategy", "checkpointing", "train.micro_batch", "stack")


def run_overrides(config: RunConfig) -> list[str]:
    """Return the overrides that give a run this strategy, checkpointing and micro-batch.

    Of the presets in conf/strategy it is the one that needs the fewest further overrides.
    """
    wanted = vars(config.strategy)
    same_library = [preset for preset in strategy_presets() if all(preset[key] == wanted[key] for key in _OF_LIBRARY)]
    strategy = min(([f"strategy={preset['name']}", *_changes(preset, wanted)] for preset in same_library), key=len)
    checkpointing = [f"checkpointing={config.checkpointing.name}", *_checkpointing_overrides(config.checkpointing)]
    return [*strategy, *checkpointing, f"train.micro_batch={config.train.micro_batch}"]


def preset_of(overrides: Sequence[str]) -> str:
    """Return the name of the preset among these overrides."""
    return next(word.partition("=")[2] for word in overrides if word.startswith("strategy="))


def run_command(planned: Sequence[str], config: RunConfig) -> str:
    """Return the command that runs a layout which was found by these overrides of `harness plan`."""
    others = [word for word in planned if not _is_chosen(word.lstrip("+").partition("=")[0])]
    return shlex.join(["harness", *others, *run_overrides(config)])


@cache
def strategy_presets() -> list[GroupValues]:
    """Return the values of all strategy presets, with defaults for those that a file leaves out.

    The one that stands for all strategies is not among them. A value that depends on the machine is still its formula.
    """
    defaults = vars(StrategyConfig(name=SEARCH))
    paths = files_in("strategy")
    return [defaults | yaml.safe_load(path.read_text()) for name, path in paths.items() if name != SEARCH]


def _is_chosen(key: str) -> bool:
    return any(key == chosen or key.startswith(f"{chosen}.") for chosen in _CHOSEN)


def _changes(preset: GroupValues, wanted: GroupValues) -> list[str]:
    """Return the overrides in which a strategy differs from a preset of the same library.

    A degree that the preset leaves to the world (-1) follows from the others.
    """
    keys = [key for key in preset if key not in ("name", *_OF_LIBRARY) and preset[key] not in (-1, wanted[key])]
    return [f"strategy.{key}={_text(wanted[key])}" for key in keys]


def _checkpointing_overrides(checkpointing: CheckpointingConfig) -> list[str]:
    """Return what a kind of checkpointing has beside its name where that is not its default."""
    defaults = CheckpointingConfig(checkpointing.name, every=2 if checkpointing.name == "every_n" else 1)
    changed = [key for key, value in vars(checkpointing).items() if value != getattr(defaults, key)]
    return [f"checkpointing.{key}={_text(getattr(checkpointing, key))}" for key in changed]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
