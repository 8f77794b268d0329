"""The combinations of settings that a command line of `harness plan` names, as those of runs. Imports no torch."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.config.arguments import find_mistake, normalize_arguments
from harness.config.hydra import sweeper_params
from harness.util.errors import UserError


@dataclass(frozen=True)
class Combination:
    """The overrides of one configuration, and their values by the dotted key."""

    overrides: Sequence[str]
    values: Mapping[str, str]
    swept: str  # the settings that differ between combinations, as they are typed; empty where there is one alone


def combinations(arguments: Sequence[str]) -> list[Combination]:
    """Return every combination of comma lists, and of the lists of a sweep file. Raises UserError for a mistake.

    A key on the command line replaces the list that the sweep file has for it, as in a run.
    """
    words = [word for word in normalize_arguments(arguments) if word not in ("-m", "--multirun")]
    is_sweep = len(words) < len(arguments)
    mistake = find_mistake([*(["-m"] if is_sweep else []), *words])
    if mistake is not None:
        raise UserError(mistake)
    parser = OverridesParser.create()
    overrides = parser.parse_overrides(words)
    keys = [override.key_or_group for override in overrides]
    if "sweeps" in keys:
        single = [str(override.input_line) for override in overrides if not override.is_sweep_override()]
        of_file = sweeper_params(*single, primary="plan")
        overrides += parser.parse_overrides([f"{key}={value}" for key, value in of_file.items() if key not in keys])
    choices = []
    for override in overrides:
        if override.is_sweep_override():
            name = override.get_key_element()
            choices.append([(override.key_or_group, f"{name}={value}") for value in override.sweep_string_iterator()])
        else:
            choices.append([(override.key_or_group, str(override.input_line))])
    several = [len(entries) > 1 for entries in choices]
    return [
        Combination(
            [text for _, text in chosen],
            {key: text.partition("=")[2] for key, text in chosen},
            " ".join(text for (_, text), varies in zip(chosen, several, strict=True) if varies),
        )
        for chosen in itertools.product(*choices)
    ]
