"""The arguments of a command that makes runs: their form as Hydra takes it, and mistakes in them before it does."""

import argparse
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from harness.config.command import NAME_RULE
from harness.config.hydra import LISTS, composing
from harness.config.locations import files_in
from harness.config.mistakes import (
    FREE_KEYS,
    NO_KEYS,
    canonical,
    choices_of,
    foreign_line,
    group_names,
    known_keys,
    preset,
    setting,
    similar_settings,
    unknown_choice,
    unknown_key,
    wrong_value,
)
from harness.config.model_files import names_model
from harness.util.text import UserError, join_words

# Options of a strategy or a tracker, whose keys only an engine or that tracker knows: they may be new ones.
OPTIONS = re.compile(r"^(?=(strategy|tracking)\.options[.=])")

# Settings of keys that take several values, without brackets: a comma there does not make a sweep.
UNBRACKETED = re.compile(rf"^({'|'.join(LISTS)})=([^\[].*)", re.DOTALL)

# Options and keys with which Hydra reads other files than ours, so that only it knows what they have.
OTHER_FILES = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "hydra.searchpath")


def normalize_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra takes them: options may stand anywhere, and lists need no brackets.

    Raises UserError for what cannot be right in them, with what to type instead.
    """
    words = list(arguments)
    parser = _hydra_parser()
    _check_options(words, parser)
    _check_spaces(words)
    parsed = parser.parse_known_intermixed_args(words)[0]
    for before, word in itertools.pairwise(["", *parsed.overrides]):
        if "=" not in word and not word.startswith("~"):
            raise UserError(f"{word} {_word_mistake(word, before)}")
    for word in parsed.overrides:
        words.remove(word)
    settings = [re.sub(OPTIONS, "++", re.sub(UNBRACKETED, r"\1=[\2]", word)) for word in parsed.overrides]
    for text in settings:
        refuse_target(text, text)
    overrides = _parsed(settings)
    known = {*known_keys(), *group_names()}
    several = [str(o.input_line) for o in overrides if o.is_sweep_override() and o.key_or_group in known]
    _check_together(overrides)
    is_sweep = parsed.multirun or any(override.key_or_group in ("sweeps", "hydra.mode") for override in overrides)
    if several and not is_sweep:
        example = f"as in harness -m {' '.join(several)}"
        raise UserError(f"{several[0]} has several values: add -m to run every combination, {example}")
    if not any(word.partition("=")[0] in OTHER_FILES for word in (*words, *settings)):
        for override in overrides:
            _check_override(override)
        for override in overrides:
            if override.key_or_group == "sweeps" and (path := files_in("sweeps").get(str(override.value()))):
                _check_sweep(path, parsed.multirun)
    return [*words, *settings]


def _parsed(settings: Sequence[str]) -> list[Override]:
    """Return settings as Hydra reads them. Raises UserError for one that it cannot."""
    try:
        overrides: list[Override] = OverridesParser.create().parse_overrides(list(settings))
    except OverrideParseException as error:
        key, _, value = error.override.partition("=")
        rest = f"cannot be read: put quotes around the value, as in '{key}=\"{value}\"'"
        if key == "name":
            rest = NAME_RULE
        elif re.search(r"\s[\w.]+=", value):
            rest = "has several settings: take the quotes away"
        elif key in group_names():
            raise UserError(unknown_choice(key, value)) from None
        raise UserError(f"{error.override} {rest}") from None
    return overrides


def _check_together(overrides: Sequence[Override]) -> None:
    """Raise UserError for two sweeps, of other groups the last counts, and for a repeat's number without a count."""
    keys = dict.fromkeys(override.key_or_group for override in overrides if override.package is None)
    for key in keys:
        texts = [str(override.input_line) for override in overrides if override.key_or_group == key]
        values = ",".join(dict.fromkeys(text.partition("=")[2] for text in texts))
        if "," in values and key == "sweeps":
            first = values.partition(",")[0]
            raise UserError(f"{' '.join(texts)}: sweeps run one at a time: type harness sweeps={first}, then the next")
        if key == "repeat" and "repeats" not in keys and re.fullmatch(r"0*[1-9]\d*", values):
            raise UserError(
                f"{texts[0]} is the number of one repeat: did you mean repeats={values}? If not, add repeats=1"
            )


def _check_sweep(path: Path, is_multirun: bool) -> None:
    """Raise UserError for a mistake in the file of a sweep, with the line to write."""
    text, where = path.read_text(errors="replace"), f"sweeps/{path.name}"
    with composing():
        values = yaml.safe_load(text) or {}
    if not re.search(r"^# @package _global_", text, re.MULTILINE):
        raise UserError(f"{where} lacks its first line: write # @package _global_")
    hydra = OmegaConf.create({"mode": None, "sweeper": {"params": {}}} | (values.get("hydra") or {}))
    params = OmegaConf.select(hydra, "sweeper.params") or {}
    for key, value in values.items():
        choices = ",".join(map(str, value)) if isinstance(value, list) else value
        if key in group_names() and not isinstance(value, dict):
            raise UserError(f"{where}: {key}: {value} is a choice: write {key}: {choices} under hydra.sweeper.params")
        if key not in (*group_names(), *known_keys(), "hydra", "defaults"):
            raise UserError(f"{where}: {unknown_key(key, str(choices))}")
    for key, value in params.items():
        if OmegaConf.is_list(value):
            raise UserError(f"{where}: {key}: {value} is a list: write {key}: {','.join(map(str, value))}")
        for override in _parsed([f"{key}={str(value).lower() if isinstance(value, bool) else value}"]):
            _check_override(override)
    if params and hydra.mode != "MULTIRUN" and not is_multirun:
        raise UserError(f"{where} varies nothing without mode: MULTIRUN under hydra: write it, or add -m")


def refuse_target(text: str, where: str) -> None:
    """Raise UserError for a setting or a file that names code, which Hydra would run even under keys of its own."""
    if "_target_" in text:
        raise UserError(f"{where}: _target_ names code to run, which no key of the harness takes: leave it out")


def _check_override(override: Override) -> None:
    """Raise UserError for a mistake in one override."""
    key, values = override.key_or_group, _values(override)
    if key in ("hydra.launcher", "hydra.sweeper"):
        raise UserError(f"{override.input_line} is a group: type {key.replace('.', '/')}={values[0]}")
    if override.type in (OverrideType.DEL, OverrideType.ADD) and key in group_names():
        off = "none" if "none" in choices_of(key) else "NAME"
        raise UserError(f"{override.input_line}: every run has one {key}: type {key}={values[0] or off}")
    if override.type is OverrideType.DEL or key.startswith(FREE_KEYS) or override.package is not None:
        return
    if key in known_keys() and key not in group_names():
        for mistake in filter(None, (wrong_value(key, value) for value in values)):
            raise UserError(mistake)
    elif key in group_names():
        if isinstance(names := override.value(), list):
            example = f"type -m {key}={','.join(map(str, names))} to run each of them"
            raise UserError(f"{override.input_line} is a list: {example}")
        for value in values:
            if path := files_in(key).get(value):
                refuse_target(path.read_text(errors="replace"), str(path))
            elif value.startswith(("$", "{")) or f"{key}={value}" == "sweeps=null":
                continue  # only Hydra knows it
            elif not names_model(f"{key}={value}"):
                raise UserError(unknown_choice(key, value))
    elif override.type is not OverrideType.ADD or not choices_of(key):
        raise UserError(unknown_key(key, ",".join(values)))


def _values(override: Override) -> list[str]:
    """Return the values of an override as text; none where only Hydra can enumerate them."""
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return []
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [str(override.input_line).partition("=")[2]]


def _hydra_parser() -> argparse.ArgumentParser:
    """Return Hydra's parser of options, which raises UserError instead of printing its usage."""
    parser: argparse.ArgumentParser = get_args_parser()

    def refuse(message: str) -> None:
        example = "type --cfg job" if "--cfg" in message else "`harness --help` shows the options"
        raise UserError(f"{message}: {example}")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    return parser


def _check_options(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise UserError for an option that there is not, with the setting that it is instead."""
    known = {option for action in parser._actions for option in action.option_strings}
    by_spelling = {canonical(option).replace("_", ""): option for option in known}
    strange = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]
    if instead := foreign_line(words, strange):
        raise UserError(f"{' '.join(words)} is of another program: {instead}")
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name in ("--shell-completion", "-sc"):
            script = 'type eval "$(harness completion bash)", or zsh, or fish'
            raise UserError(f"{name} is replaced by a command: {script}")
        if not word.startswith("-") or name in known:
            continue
        if not value and "=" not in following and not following.startswith("-"):
            value = following
        option = by_spelling.get(canonical(name).replace("_", ""))
        instead = f"type {option}" if option else _as_setting(name.lstrip("-"), value)
        raise UserError(f"{name} is not an option: {instead}")


def _as_setting(key: str, value: str) -> str:
    """Return what to type in the place of an option."""
    name = canonical(key)
    if name in NO_KEYS:
        return NO_KEYS[name]
    exact = next((entry for entry in (*group_names(), *known_keys()) if canonical(entry) == name), None)
    instead = setting(exact, value) if exact else similar_settings(key, value or "true")
    return (
        f"type {join_words(instead, 'or')}"
        if instead
        else "settings are KEY=VALUE, and `harness --help` shows the options"
    )


def _check_spaces(words: Sequence[str]) -> None:
    """Raise UserError for a setting that spaces have torn into several arguments."""
    for word, following, rest in zip(words, [*words[1:], ""], [*words[2:], "", ""], strict=False):
        is_setting = "=" in following.strip("=") or following.startswith("-")
        if word.endswith((",", "=")) and following and not is_setting:
            raise UserError(f"{word} {following} has a space in it: type {word}{following}")
        if "=" not in word and not word.startswith("-") and following.startswith("="):
            torn = (word, following, rest) if following == "=" and rest else (word, following)
            raise UserError(f"{' '.join(torn)} has spaces in it: type {''.join(torn)}")
        if word.endswith("=") and word.count("=") == 1:
            raise UserError(f"{word} has no value: {_value_text(word[:-1])}")


def _word_mistake(word: str, before: str) -> str:
    """Return what is wrong with an argument that has no `=`, and follows another one, and what to type instead."""
    key, colon, value = word.partition(":")
    if colon and (key in group_names() or key in known_keys()):
        return f"is not KEY=VALUE: type {key}={value}"
    if instead := preset(word):
        return f"is not KEY=VALUE: type {instead}"
    if Path(word).is_dir():
        return f"is not KEY=VALUE: type harness report {word}"
    if canonical(word) in group_names():
        return f"has no value: {_value_text(canonical(word))}"
    if "=" in before:
        return f"is not KEY=VALUE: type '{before} {word}' with its quotes if it belongs to the value"
    return "is not KEY=VALUE: `harness --help` shows the settings"


def _value_text(key: str) -> str:
    """Return what to type for a key or a group whose value is missing."""
    if key in group_names():
        return f"choose {', '.join(f'{key}={choice}' for choice in choices_of(key))}"
    return f"type {key}=VALUE"
