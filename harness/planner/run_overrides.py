"""The overrides by which a layout of a search is run: the nearest strategy preset, and what differs. No torch."""

import shlex
from collections.abc import Sequence
from functools import cache
from typing import Any

import yaml

from harness.config.from_dict import GroupValues
from harness.config.locations import files_in
from harness.config.schema import CheckpointingConfig, RunConfig
from harness.config.strategy import StrategyConfig

SEARCH = "search"  # the strategy that stands for all of them

# The library, its settings, and whether these are the papers': of a preset as it is.
_OF_LIBRARY = ("engine", "options", "literature")

# The settings that a search chooses, which a run's command line has from its answer; a stack is a plan's alone.
_CHOSEN = ("strategy.", "checkpointing.", "train.micro_batch.", "stack.")


def run_overrides(config: RunConfig) -> list[str]:
    """Return the overrides that give a run this strategy, checkpointing and micro-batch.

    The first is the preset: of those in conf/strategy the one that needs the fewest further overrides.
    """
    wanted = vars(config.strategy)
    same_library = [preset for preset in strategy_presets() if all(preset[key] == wanted[key] for key in _OF_LIBRARY)]
    strategies = ([f"strategy={preset['name']}", *_changes("strategy", preset, wanted)] for preset in same_library)
    kind = config.checkpointing.name
    defaults = CheckpointingConfig(kind, every=2 if kind == "every_n" else 1)
    checkpointing = _changes("checkpointing", vars(defaults), vars(config.checkpointing))
    words = [*min(strategies, key=len), f"checkpointing={kind}", *checkpointing]
    return [*words, f"train.micro_batch={config.train.micro_batch}"]


def run_command(planned: Sequence[str], config: RunConfig) -> str:
    """Return the command that runs a layout which was found by these overrides of `harness plan`."""
    keys = {word: word.lstrip("+").partition("=")[0] for word in planned}
    others = [word for word in planned if not f"{keys[word]}.".startswith(_CHOSEN)]
    return shlex.join(["harness", *others, *run_overrides(config)])


@cache
def strategy_presets() -> list[GroupValues]:
    """Return the values of all strategy presets, with defaults for those that a file leaves out.

    The one that stands for all strategies is not among them. A value that depends on the machine is still its formula.
    """
    defaults = vars(StrategyConfig(name=SEARCH))
    paths = files_in("strategy")
    return [defaults | yaml.safe_load(path.read_text()) for name, path in paths.items() if name != SEARCH]


def _changes(group: str, preset: GroupValues, wanted: GroupValues) -> list[str]:
    """Return the overrides in which the values of a group differ from a preset of the same name or library.

    A degree that the preset leaves to the world (-1) follows from the others.
    """
    keys = [key for key in preset if key not in ("name", *_OF_LIBRARY) and preset[key] not in (-1, wanted[key])]
    return [f"{group}.{key}={_text(wanted[key])}" for key in keys]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
