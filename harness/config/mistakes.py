"""Mistakes in the arguments of a command, nearest before Hydra composes them, and what to type instead.

Hydra's own parser reads the overrides. Only what cannot be right is a mistake: anything else is left to Hydra and to
the typed configuration, whose errors harness.config.hydra explains.
"""

import difflib
import math
import re
import shlex
import tomllib
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from harness.config.command import CommandConfig
from harness.config.devices import device_named
from harness.config.from_dict import TYPE_NAMES, is_group
from harness.config.locations import files_in, preset_folders
from harness.config.model import HFModelInfo
from harness.config.schema import RunConfig
from harness.util.text import UserError, join_words

MOST_SUGGESTIONS = 3


def canonical(name: str) -> str:
    """Return the form of a name in which spellings are compared."""
    return re.sub(r"[-./+&\s]+", "_", name.strip().lower()).strip("_")


def _by_name(names: dict[str, list[str]]) -> dict[str, str]:
    return {name: meant for meant, known in names.items() for name in known}


# The names by which other programs and papers know what the command line calls otherwise.
_ALIASES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("aliases.toml").read_text("utf-8"))
_BOOLEANS = _by_name(_ALIASES["booleans"])
KEYS = _by_name(_ALIASES["keys"])  # what to type, with `{}` for the value
NO_KEYS = _by_name(_ALIASES["no_keys"])  # sentences
NO_VALUES = {group: _by_name(names) for group, names in _ALIASES["no_values"].items()}  # sentences
VALUES = {
    group: {name: tuple(meant.split(", ")) for name, meant in _by_name(names).items()}
    for group, names in _ALIASES["values"].items()
}
WORDS = _by_name(_ALIASES["words"])  # what to do instead of a command that there is not
KEY_VALUES = {key: _by_name(names) for key, names in _ALIASES["key_values"].items()}

_SECONDS = {"s": 1, "m": 60, "h": 3600}

LENGTHS = ("train.seq_len", "model.context_length")  # in tokens, whose k is 1,024

# What settings mean that are possible but seldom meant, where a key of another program leads to them.
_OTHER_SETTINGS = {("world_size", "0"): "cluster.device=cpu"} | {
    ("strategy.zero_stage", stage): f"strategy=zero{stage}" for stage in "123"
}

# Programs that start others, whose lines are for `harness import`.
PROGRAMS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "srun", "mpirun", "trl", "axolotl")

# Whose names are known without their group.
WORD_GROUPS = ("strategy", "model", "sweeps", "checkpointing", "precision", "cluster", "optimizer", "tracking")

FREE_KEYS = ("strategy.options.", "tracking.options.", "hydra.", "hydra/")  # whose keys only a library knows


def foreign_line(words: Sequence[str], options: Sequence[str]) -> str | None:
    """Return what to type for words that are of another program, as options that are not known are; None if none is."""
    files = [word for word in words if re.fullmatch(r"(?!.*=)[^-].*\.(json|ya?ml|toml|py)", word) and not preset(word)]
    if (words[:1] and words[0] in PROGRAMS) or len(options) > 1:
        return f"type harness import -- {shlex.join(words)}"
    return f"type harness import {shlex.quote(files[0])}" if files else None


def preset(word: str) -> str | None:
    """Return the setting for a word that is a name of a group, here or elsewhere, or a file in conf/ or sweeps/."""
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        group = path.parent.name or "sweeps"
        return f"{group}={path.stem}" if group in group_names() and path.stem in choices_of(group) else None
    known = (group for group in WORD_GROUPS if word in choices_of(group) or canonical(word) in VALUES.get(group, {}))
    return next((join_words(similar_choices(group, word), "or") for group in known), None)


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
    remedy = f"choose {', '.join(choices_of(group))}" + (", or OWNER/NAME in the hub" if group == "model" else "")
    if sentence := NO_VALUES.get(group, {}).get(canonical(value)):
        remedy = sentence
    elif instead := similar_choices(group, value):
        remedy = f"did you mean {join_words(instead, 'or')}?"
    if group == "model" and (Path(value) / "config.json").is_file():
        remedy = f"type model=./{value} for the folder of that name"
    return f"{group}={value} is not known: {remedy}"


def similar_choices(group: str, value: str) -> list[str]:
    """Return what to type instead of a name that a group does not have, the likeliest first; nothing if unclear."""
    choices, name = choices_of(group), canonical(value)
    same = [choice for choice in choices if canonical(choice) == name or choice == Path(value).stem]
    parts = [part for part in re.split(r"[][(),;|/=\s'\"]+", value) if part]
    if not same and len(parts) > 1 and set(parts) <= set(choices):
        return [f"-m {group}={','.join(parts)}"]
    meant = same or list(VALUES.get(group, {}).get(name, ()))
    if not meant and len(name) > 2:
        meant = [choice for choice in choices if canonical(choice).startswith(name)]
    if not meant and group == "model":
        meant = similar_models(value, choices)
    if not meant and group == "cluster":
        meant = similar_clusters(name, choices)
    if not meant:
        spellings = {canonical(choice): choice for choice in choices}
        meant = [spellings[close] for close in difflib.get_close_matches(name, spellings, MOST_SUGGESTIONS, 0.6)]
    return [_typed(group, text) for text in meant[:MOST_SUGGESTIONS]]


def _typed(key: str, meant: str) -> str:
    """Return what to type for a value that is meant, which may be a setting of another key."""
    return meant if "=" in meant.partition(" ")[0] else f"{key}={meant}"


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
    spellings = {canonical(entry.rpartition(".")[2]): entry for entry in reversed(siblings or [*groups, *keys, *KEYS])}
    for close in difflib.get_close_matches(last, spellings, 1, 0.75):
        return setting(KEYS.get(spellings[close], spellings[close]), value)
    return []


def setting(key: str, value: str) -> list[str]:
    """Return the setting of a key or group to a value, or to what such a value probably means."""
    if "{}" in key:
        return [key.format(value or "VALUE")]
    if key in group_names():
        if {*value.split(",")} <= {*choices_of(key)}:
            return [f"{key}={value}"]
        return similar_choices(key, value) or [f"{key}={choice}" for choice in choices_of(key)[:MOST_SUGGESTIONS]]
    meant = _typed(key, KEY_VALUES.get(key, {}).get(canonical(value), value) or "VALUE")
    in_form = None if is_group(known_keys()[key]) else _in_form(key, value)
    if in_form:
        return [f"{key}={in_form[1]}"]
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
        return f"{key}={value} is not known: did you mean {_typed(key, other)}?"
    if typing.get_origin(hint) is dict and not value.startswith(("{", "$")):
        instead = foreign_line([value], ()) or f"type {key}={{KEY: VALUE}}"
        return f"{key}={value} is not a group like {{KEY: VALUE}}: {instead}"
    if in_form := _in_form(key, value):
        return f"{key}={value} is not {in_form[0]}: did you mean {key}={in_form[1]}?"
    return None


def _in_form(key: str, value: str) -> tuple[str, Any] | None:
    """Return the type of a key as text, and a value in its form that stands for this one; None if there is none."""
    duration = re.fullmatch(r"(\d+)\s*([smh])[a-z]*", value) if key.endswith("_seconds") else None
    hint = known_keys()[key]
    kinds = (hint, *typing.get_args(hint))  # text that is allowed stands for itself, such as a size of memory
    kind: Any = next((kind for kind in kinds if kind in (bool, int, float) and str not in kinds), None)
    meant = {
        bool: _BOOLEANS.get(value.lower()),
        float: int(duration[1]) * _SECONDS[duration[2]] if duration else _number(key, value),
        int: _whole_number(key, value),
    }.get(kind)
    return None if meant is None else (TYPE_NAMES[kind], meant)


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


FAMILIES, HUB = _ALIASES["families"], _ALIASES["hub"]
SIZE = r"(\d+(?:\.\d+)?)[\s_-]*([bmt])"
SCALES = {"m": 1e6, "b": 1e9, "t": 1e12}


def similar_models(name: str, choices: Sequence[str]) -> list[str]:
    """Return the models that a name probably means: those with the same source, else family and nearest size.

    One of a family that is in the hub alone is returned as the setting with its name there.
    """
    stem = name.lower().rpartition("/")[2]
    same = [model for model, path in files_in("model").items() if model in choices and stem == source_name(path)]
    size = re.search(rf"(?<![\d.]){SIZE}(?![a-z])", stem)
    plain = re.sub(r"[\W_]+", "", stem)
    hub = next((hub for family, hub in HUB.items() if plain.startswith(family)), None)
    if hub and not same and (size or "{}" not in hub):
        return [f"model={hub.format(size and size[1])}"]
    if same or size is None:
        return same
    family = next((family for family in FAMILIES if family in stem), None)
    if family is None and plain != f"{size[1]}{size[2]}".replace(".", ""):
        return []  # another family, whose sizes say little
    prefix = FAMILIES.get(family or "llama", "")  # a size alone, such as 7B, is one of llama
    known = {choice: re.fullmatch(SIZE, choice.removeprefix(prefix)) for choice in choices if choice.startswith(prefix)}
    sizes = {choice: float(match[1]) * SCALES[match[2]] for choice, match in known.items() if match}
    wanted = float(size[1]) * SCALES[size[2]]
    return sorted(sizes, key=lambda choice: max(sizes[choice], wanted) / min(sizes[choice], wanted))[:1]


def similar_clusters(name: str, choices: Sequence[str]) -> list[str]:
    """Return the clusters of as many GPUs as a name such as 16xh100, h200x16 or 2x8xa100 says, by file or datasheet."""
    match = re.fullmatch(r"((?:\d+_?x_?|\d+_)*)([a-z_]*\d+[a-z0-9_]*?)(?:gb)?((?:_?x_?\d+)*)", name)
    if match is None:
        return []
    counts, meant = re.findall(r"\d+", match[1] + match[3]), []
    for choice in [choice for choice in choices if choice.partition("x")[2] == match[2]] or choices:
        node, _, gpu = choice.partition("x")
        if node.isdigit() and re.match(rf"[a-z]*{match[2]}(_|$)", gpu):
            count = math.prod(map(int, counts)) if counts else int(node)
            nodes, rest = divmod(count, int(node))
            several = f" cluster.nodes={nodes}" if nodes and not rest else f" cluster.gpus_per_node={count}"
            meant.append(choice if count == int(node) else choice + several)
    with suppress(UserError):
        device_named(match[2])
        meant = meant or [f"cluster=gpu cluster.hardware.device_name={match[2]}"]
    return meant


def source_name(path: Path) -> str | None:
    """Return the name on the hub, without its owner and in lower case, of a model's file; None if it has none."""
    match = re.match(r"[\w-]+/([\w.-]+)", str((yaml.safe_load(path.read_text()) or {}).get("source", "")))
    return match and match[1].lower()
