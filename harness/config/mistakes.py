"""Mistakes in the arguments of a command, nearest before Hydra composes them, and what to type instead.

Hydra's own parser reads the overrides. Only what cannot be right is a mistake: anything else is left to Hydra and to
the typed configuration, whose errors harness.config.hydra explains.
"""

import difflib
import re
import shlex
import tomllib
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from harness.config.command import CommandConfig
from harness.config.from_dict import TYPE_NAMES, is_group
from harness.config.locations import files_in, preset_folders
from harness.config.model import HFModelInfo
from harness.config.schema import RunConfig
from harness.util.text import join_words

MOST_SUGGESTIONS = 3


def canonical(name: str) -> str:
    """Return the form of a name in which spellings are compared."""
    return re.sub(r"[-./\s]+", "_", name.strip().lower()).strip("_")


def _by_name(names: dict[str, list[str]]) -> dict[str, str]:
    return {name: meant for meant, known in names.items() for name in known}


# The names by which other programs and papers know what the command line calls otherwise.
_ALIASES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("aliases.toml").read_text("utf-8"))
_BOOLEANS = _by_name(_ALIASES["booleans"])
KEYS = _by_name(_ALIASES["keys"])  # what to type, with `{}` for the value
NO_KEYS = _by_name(_ALIASES["no_keys"])  # sentences
VALUES = {
    group: {name: tuple(meant.split(", ")) for name, meant in _by_name(names).items()}
    for group, names in _ALIASES["values"].items()
}
KEY_VALUES = {key: _by_name(names) for key, names in _ALIASES["key_values"].items()}

_SECONDS = {"s": 1, "m": 60, "h": 3600}

LENGTHS = ("train.seq_len", "model.context_length")  # in tokens, whose k is 1,024

# What settings mean that are possible but seldom meant, where a key of another program leads to them.
_OTHER_SETTINGS = {("world_size", "0"): "cluster.device=cpu"} | {
    ("strategy.zero_stage", stage): f"strategy=zero{stage}" for stage in "123"
}

# Programs that start others, whose lines are for `harness import`.
PROGRAMS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "srun", "mpirun", "trl", "axolotl")

FREE_KEYS = ("strategy.options.", "hydra.", "hydra/")  # whose keys only a library knows


def foreign_line(words: Sequence[str], options: Sequence[str]) -> str | None:
    """Return what to type for words that are of another program, as options that are not known are; None if none is."""
    files = [word for word in words if re.fullmatch(r"(?!.*=)[^-].*\.(json|ya?ml|toml)", word)]
    if (words[:1] and words[0] in PROGRAMS) or len(options) > 1:
        return f"type harness import -- {shlex.join(words)}"
    return f"type harness import {shlex.quote(files[0])}" if files else None


def group_names() -> list[str]:
    """Return the names of all configuration groups: the folders in conf/, and sweeps."""
    folders = {path.name for conf in preset_folders("conf") for path in conf.iterdir() if path.is_dir()}
    return [*sorted(folders - {"hydra"}), "sweeps"]


def choices_of(group: str) -> list[str]:
    """Return the names that a configuration group has."""
    return list(files_in(group))


@cache
def known_keys() -> dict[str, Any]:
    """Return every dotted key with its type; a group of keys has its dataclass."""
    return dict(_keys_of(CommandConfig, "")) | dict(_keys_of(RunConfig, ""))


def _keys_of(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(cls).items():
        if HFModelInfo in typing.get_args(hint):
            continue
        yield f"{prefix}{name}", hint
        for group in filter(is_group, (hint, *typing.get_args(hint))):  # one that may be null, too
            yield from _keys_of(group, f"{prefix}{name}.")


def unknown_choice(group: str, value: str) -> str:
    """Return that a group has no such name, with what to type instead."""
    remedy = f"choose {', '.join(choices_of(group))}"
    instead = similar_choices(group, value)
    if instead:
        remedy = f"did you mean {join_words(instead, 'or')}?"
    if group == "model" and (Path(value) / "config.json").is_file():
        remedy = f"type model=./{value} for the folder of that name"
    return f"{group}={value} is not known: {remedy}"


def similar_choices(group: str, value: str) -> list[str]:
    """Return what to type instead of a name that a group does not have, the likeliest first; nothing if unclear."""
    choices, name = choices_of(group), canonical(value)
    same = [choice for choice in choices if canonical(choice) == name or choice == Path(value).stem]
    meant = same or list(VALUES.get(group, {}).get(name, ()))
    if not meant and group == "model":
        meant = similar_models(value, choices)
    if not meant and len(name) > 2:
        meant = [choice for choice in choices if canonical(choice).startswith(name)]
    if not meant:
        spellings = {canonical(choice): choice for choice in choices}
        meant = [spellings[close] for close in difflib.get_close_matches(name, spellings, MOST_SUGGESTIONS, 0.6)]
    return [text if "=" in text.partition(" ")[0] else f"{group}={text}" for text in meant[:MOST_SUGGESTIONS]]


def unknown_key(key: str, value: str) -> str:
    """Return that there is no such key, with what to type instead."""
    name = canonical(key)
    sentence = NO_KEYS.get(name) or NO_KEYS.get(canonical(key.rpartition(".")[2]))
    if sentence:
        return f"{key} is not a key: {sentence}"
    instead = similar_settings(key, value)
    if instead:
        return f"{key} is not a key: did you mean {join_words(instead, 'or')}?"
    group = key.rpartition(".")[0]
    names = [entry.removeprefix(f"{group}.") for entry in known_keys() if group and entry.rpartition(".")[0] == group]
    if names:
        return f"{key} is not a key: choose one of {', '.join(names)}"
    return f"{key} is not a key of the configuration: `harness --cfg job` prints all of them"


def similar_settings(key: str, value: str) -> list[str]:
    """Return the settings to type instead of one whose key does not exist, the likeliest first."""
    name, last = canonical(key), canonical(key.rpartition(".")[2])
    groups, keys = group_names(), known_keys()
    single = [entry for entry in reversed(keys) if not is_group(keys[entry])]
    exact = {canonical(entry.split(".", cut)[-1]): entry for entry in single for cut in (2, 1, 0)}
    exact |= dict(zip(groups, groups, strict=True)) | KEYS
    for spelling in (name, last):
        if spelling in exact:
            return setting(exact[spelling], value)
    owner = key.rpartition(".")[0]
    siblings = [entry for entry in keys if owner and entry.startswith(f"{owner}.")]
    for candidates in (siblings, [*groups, *keys, *KEYS]):
        spellings = {canonical(entry.rpartition(".")[2]): entry for entry in reversed(candidates)}
        close = difflib.get_close_matches(last, spellings, 1, 0.75)
        if close:
            nearest = spellings[close[0]]
            return setting(KEYS.get(nearest, nearest), value)
    return []


def setting(key: str, value: str) -> list[str]:
    """Return the setting of a key or group to a value, or to what such a value probably means."""
    if "{}" in key:
        return [key.format(value or "VALUE")]
    if key in group_names():
        if value in choices_of(key):
            return [f"{key}={value}"]
        return similar_choices(key, value) or [f"{key}={choice}" for choice in choices_of(key)[:MOST_SUGGESTIONS]]
    meant = f"{key}={KEY_VALUES.get(key, {}).get(canonical(value), value) or 'VALUE'}"
    return [_OTHER_SETTINGS.get((key, value), meant)]


def wrong_value(key: str, value: str) -> str | None:
    """Return why a value cannot be right for a key that exists, with what to type instead; None if it may be."""
    hint = known_keys()[key]
    if is_group(hint):
        if value.startswith(("{", "$")):
            return None
        last = key.rpartition(".")[2]
        groups = [group for group in (last, f"{last}s") if value in choices_of(group)]
        names = [entry for entry in known_keys() if entry.startswith(f"{key}.")]
        remedy = f"did you mean {groups[0]}={value}?" if groups else f"choose {', '.join(names)}"
        return f"{key}={value} is not a setting, because {key} is a group of keys: {remedy}"
    other = KEY_VALUES.get(key, {}).get(canonical(value))
    if other is not None and other != value:
        return f"{key}={value} is not known: did you mean {key}={other}?"
    duration = re.fullmatch(r"(\d+)\s*([smh])[a-z]*", value) if key.endswith("_seconds") else None
    if typing.get_origin(hint) is dict and not value.startswith(("{", "$")):
        instead = foreign_line([value], ()) or f"type {key}={{KEY: VALUE}}"
        return f"{key}={value} is not a group like {{KEY: VALUE}}: {instead}"
    kinds = (hint, *typing.get_args(hint))  # text that is allowed stands for itself, such as a size of memory
    kind: Any = next((kind for kind in kinds if kind in (bool, int, float) and str not in kinds), None)
    meant = {
        bool: _BOOLEANS.get(value.lower()),
        float: int(duration[1]) * _SECONDS[duration[2]] if duration else _number(key, value),
        int: _whole_number(key, value),
    }.get(kind)
    return None if meant is None else f"{key}={value} is not {TYPE_NAMES[kind]}: did you mean {key}={meant}?"


def _amount(key: str, value: str) -> float | None:
    """Return what a text such as 1e3, 10k, 300B or $2 stands for; None for any other. The k of a length is 1,024."""
    text, suffix = (value[:-1], value[-1:].lower()) if value[-1:].isalpha() else (value, "")
    scales = SCALES | {"": 1.0, "k": 1024.0 if key in LENGTHS else 1000.0}
    try:
        return float(text.removeprefix("$")) * scales[suffix]
    except (KeyError, ValueError):
        return None


def _whole_number(key: str, value: str) -> int | None:
    """Return the whole number that a text stands for; None for digits alone, and where it is none."""
    number = None if value.lstrip("+-").isdigit() else _amount(key, value)
    return int(number) if number is not None and number.is_integer() else None


def _number(key: str, value: str) -> str | None:
    """Return the number that a text with a suffix or a $ stands for; None for any other."""
    number = _amount(key, value) if value[:1] == "$" or value[-1:].isalpha() else None
    return None if number is None else f"{number:.10g}".replace("e+", "e")


FAMILIES = _ALIASES["families"]
SIZE = r"(\d+(?:\.\d+)?)[\s_-]*([bmt])"
SCALES = {"m": 1e6, "b": 1e9, "t": 1e12}


def similar_models(name: str, choices: Sequence[str]) -> list[str]:
    """Return the models that a name probably means: those with the same source, else family and nearest size."""
    stem = name.lower().rpartition("/")[2]
    same = [model for model, path in files_in("model").items() if model in choices and stem == source_name(path)]
    size = re.search(rf"(?<![\d.]){SIZE}(?![a-z])", stem)
    if same or size is None:
        return same
    family = next((family for family in FAMILIES if family in stem), None)
    if family is None and re.sub(r"[\W_]+", "", stem) != f"{size[1]}{size[2]}".replace(".", ""):
        return []  # another family, whose sizes say little
    prefix = FAMILIES.get(family or "llama", "")  # a size alone, such as 7B, is one of llama
    known = {choice: re.fullmatch(SIZE, choice.removeprefix(prefix)) for choice in choices if choice.startswith(prefix)}
    sizes = {choice: float(match[1]) * SCALES[match[2]] for choice, match in known.items() if match}
    wanted = float(size[1]) * SCALES[size[2]]
    return sorted(sizes, key=lambda choice: max(sizes[choice], wanted) / min(sizes[choice], wanted))[:1]


def source_name(path: Path) -> str | None:
    """Return the name on the hub, without its owner and in lower case, of a model's file; None if it has none."""
    match = re.match(r"[\w-]+/([\w.-]+)", str((yaml.safe_load(path.read_text()) or {}).get("source", "")))
    return match and match[1].lower()
