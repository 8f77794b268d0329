"""Every command word: what its help says and the arguments that it takes, read from commands.toml, and its start."""

import re
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from harness.cli.notice import import_slowly
from harness.tracking.base import tracker_names
from harness.util.text import UserError, join_words

# What can be listed, each by its word in the singular, which is the group of the configuration that it is.
KINDS = {"strategies": "strategy", "models": "model", "clusters": "cluster", "sweeps": "sweep"}


def run_word(word: str, arguments: Sequence[str]) -> int | None:
    """Run `harness WORD` with these arguments and return its exit status, 0 for None.

    The parsed options that its module's main() takes have `settings`, the words that are none, `line`, those after --
    where the command takes them, and `fail`, which ends the program with a mistake in the arguments.
    """
    if (word, *arguments[:1]) == ("completion", "query"):  # the question of the shell's script
        print("\n".join(import_module("harness.cli.completion").candidates(" ".join(arguments[1:]))))
        return None
    command, words = COMMANDS[word], list(takewhile(lambda argument: argument != "--", arguments))
    line = arguments[len(words) + 1 :]
    parser = ArgumentParser(prog=f"harness {word}", description=command["about"], epilog=command.get("epilog"))
    parser.error = partial(refuse, word)  # type: ignore[assignment, method-assign]
    values: Mapping[str, Mapping[str, Any]] = {"type": TYPES, "choices": CHOICES}
    for name, options in command["arguments"].items():
        parser.add_argument(
            name, **{key: values[key][value] if key in values else value for key, value in options.items()}
        )
    parsed, settings = parser.parse_known_args(words, Namespace(fail=parser.error, line=line))
    for setting in settings:
        for close in get_close_matches(setting, parser._option_string_actions, 1, 0.8):
            raise UserError(f"{setting} is not an option: type {close}")
    if (settings and not command.get("takes_settings")) or (line and not command.get("takes_line")):
        parser.error(f"unrecognized arguments: {' '.join([*settings, *line])}")
    parsed.settings = settings
    status: int | None = import_slowly(f"harness.cli.{command.get('module', word)}", f"harness {word}: loading").main(
        parsed
    )
    return status


def refuse(word: str, message: str) -> NoReturn:
    """Raise UserError for a mistake in the arguments of a word, with what there is for one that lacks."""
    before, _, missing = message.partition("arguments are required: ")
    if missing:
        raise UserError(f"harness {word} takes {missing}: {choices_text(word, missing)}")
    raise UserError(f"harness {word}: {before}; type harness {word} --help")


def choices_text(word: str, name: str) -> str:
    """Return what to type for an argument of this name: a choice, a comparison in ./results, or its fastest runs."""
    options = COMMANDS[word]["arguments"].get(name, {})
    names = list(CHOICES.get(options.get("choices", ""), ()))
    if not names:
        tables = sorted(Path("results").glob("*/runs.csv"), key=lambda path: path.stat().st_mtime, reverse=True)
        names = [str(table.parent) for table in tables[:3]]
        if names and name.endswith("RUN"):
            names = import_module("harness.records.store").fastest_runs(tables[0].parent)
    return f"choose {join_words(names, 'or')}" if names else "./results has none yet, so type harness sweeps=quickstart"


def parse_share(text: str) -> float:
    """Return a percentage such as 5% as a fraction. Raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if not match:
        raise ArgumentTypeError(f"{text} is not a percentage: write 5%, or 0% for no growth at all")
    return float(match[1]) / 100


def plural(word: str) -> str:
    """Return the kind that a group of the configuration has in `harness ls`: strategies for strategy."""
    return next((kind for kind, group in KINDS.items() if group == word), word)


COMMANDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TYPES = {"path": Path, "int": int, "float": float, "share": parse_share, "kind": plural}
CHOICES: dict[str, Sequence[str]] = {
    "devices": ("auto", "cpu", "cuda"),
    "statistics": ("median", "mean"),
    "processors": ("x86_64", "aarch64"),
    "shells": ("bash", "zsh", "fish"),
    "kinds": tuple(KINDS),
    "fits": ("likely", "tight"),
    "trackers": tuple(tracker_names()),
}
