"""The arguments of a command that makes runs: their form as Hydra takes it, and mistakes in them before it does."""

import argparse
import itertools
from collections.abc import Iterator, Sequence

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import OverrideParseException

from harness.config import aliases
from harness.config.aliases import canonical
from harness.config.mistakes import (
    FREE_KEYS,
    choices_of,
    group_names,
    known_keys,
    or_text,
    setting,
    similar_settings,
    unknown_choice,
    unknown_key,
    wrong_value,
)
from harness.util.errors import UserError

LIST_KEYS = ("retry", "stop_after")  # keys that take several values: a comma there does not make a sweep

# Options and keys with which Hydra reads other files than ours, so that only it knows what they have.
OTHER_FILES = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "hydra.searchpath")


def normalize_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra takes them: options may stand anywhere, and lists need no brackets.

    Raises UserError for an argument that is neither an option nor an override, with what to type instead.
    """
    words = list(arguments)
    parser = _hydra_parser()
    for mistake in itertools.chain(_option_mistakes(words, parser), _separation_mistakes(words)):
        raise UserError(mistake)
    overrides = list(parser.parse_known_intermixed_args(words)[0].overrides)
    for before, word in itertools.pairwise(["", *overrides]):
        if "=" not in word and not word.startswith("~"):
            raise UserError(_word_mistake(word, before))
    options = words.copy()
    for word in overrides:
        options.remove(word)
    return [*options, *(as_list_override(word) for word in overrides)]


def as_list_override(argument: str) -> str:
    """Return an override with brackets around the value of a key that takes several."""
    key, _, value = argument.partition("=")
    return f"{key}=[{value}]" if key in LIST_KEYS and value and not value.startswith("[") else argument


def find_mistake(arguments: Sequence[str]) -> str | None:
    """Return what cannot be right in normalized arguments, with what to type instead; None if nothing is known."""
    parsed = _hydra_parser().parse_known_intermixed_args(list(arguments))[0]
    try:
        overrides = OverridesParser.create().parse_overrides(parsed.overrides)
    except OverrideParseException as error:
        key, _, value = error.override.partition("=")
        return f"{error.override} cannot be read: put quotes around the value, as in '{key}=\"{value}\"'"
    keys = [override.key_or_group for override in overrides]
    if not parsed.multirun and not {"sweeps", "hydra.mode"} & set(keys):
        several = [str(override.input_line) for override in overrides if override.is_sweep_override()]
        if several:
            example = f"as in harness -m {' '.join(several)}"
            return f"{several[0]} has several values: add -m to run every combination, {example}"
    if any(word.partition("=")[0] in OTHER_FILES for word in arguments):
        return None
    return next((mistake for override in overrides for mistake in _override_mistakes(override)), None)


def _override_mistakes(override: Override) -> Iterator[str]:
    """Yield the mistakes of one override."""
    key = override.key_or_group
    if override.type is OverrideType.DEL or key.startswith(FREE_KEYS) or override.package is not None:
        return
    if key in group_names():
        value = override.value()
        if isinstance(value, list):
            names = ",".join(map(str, value))
            yield f"{override.input_line} is a list: type -m {key}={names} to run each of them"
            return
        for value in _values(override):
            if value not in choices_of(key) and not value.startswith(("$", "{")) and (key, value) != ("sweeps", "null"):
                yield unknown_choice(key, value)
    elif key in known_keys():
        yield from filter(None, (wrong_value(key, value) for value in _values(override)))
    elif override.type is not OverrideType.ADD or not choices_of(key):
        yield unknown_key(key, ",".join(_values(override)))


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


def _option_mistakes(words: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options that there are not, with the settings that they are instead."""
    known = {option for action in parser._actions for option in action.option_strings}
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if not word.startswith("-"):
            continue
        if name in ("--shell-completion", "-sc"):
            yield f'{name} is replaced by a command: type eval "$(harness completion bash)", or zsh, or fish'
        if name in known:
            continue
        following = words[index + 1] if index + 1 < len(words) else ""
        if not value and "=" not in following and not following.startswith("-"):
            value = following
        spelling = canonical(name).replace("_", "")
        option = next((option for option in known if canonical(option).replace("_", "") == spelling), None)
        yield f"{name} is not an option: {f'type {option}' if option else _as_setting(name.lstrip('-'), value)}"


def _as_setting(key: str, value: str) -> str:
    """Return what to type in the place of an option."""
    name = canonical(key)
    if name in aliases.NO_KEYS:
        return aliases.NO_KEYS[name]
    exact = next((entry for entry in (*group_names(), *known_keys()) if canonical(entry) == name), None)
    instead = setting(exact, value) if exact else similar_settings(key, value or "true")
    return f"type {or_text(instead)}" if instead else "settings are KEY=VALUE, and `harness --help` shows the options"


def _separation_mistakes(words: Sequence[str]) -> Iterator[str]:
    """Yield the settings that spaces have torn into several arguments."""
    for word, following in itertools.pairwise([*words, ""]):
        is_setting = "=" in following.strip("=") or following.startswith("-")
        if word.endswith((",", "=")) and following and not is_setting:
            yield f"{word} {following} has a space in it: type {word}{following}"
        elif "=" not in word and not word.startswith("-") and following.startswith("="):
            rest = words[list(words).index(word) + 2 :][:1] if following == "=" else []
            yield f"{' '.join((word, following, *rest))} has spaces in it: type {''.join((word, following, *rest))}"
        elif word.endswith("=") and word.count("=") == 1:
            yield f"{word} has no value: {_value_text(word[:-1])}"


def _word_mistake(word: str, before: str) -> str:
    """Return what to type instead of an argument that has no `=`, and follows another one."""
    key, colon, value = word.partition(":")
    if colon and (key in group_names() or key in known_keys()):
        return f"{word} is not KEY=VALUE: type {key}={value}"
    for group in ("strategy", "model", "sweeps", "checkpointing", "precision"):
        if word in choices_of(group):
            return f"{word} is not KEY=VALUE: type {group}={word}"
    if canonical(word) in group_names():
        return f"{word} has no value: {_value_text(canonical(word))}"
    if "=" in before:
        return f"{word} is not KEY=VALUE: type '{before} {word}' with its quotes if it belongs to the value"
    return f"{word} is not KEY=VALUE: `harness --help` shows the settings"


def _value_text(key: str) -> str:
    """Return what to type for a key or a group whose value is missing."""
    if key in group_names():
        return f"choose {', '.join(f'{key}={choice}' for choice in choices_of(key))}"
    return f"type {key}=VALUE"
