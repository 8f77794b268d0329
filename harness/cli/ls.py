"""harness ls strategies|models|clusters|sweeps: the names that a group has, with one line about each."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from harness.config.from_dict import GroupValues
from harness.config.locations import conf_folders, files_in, first_sentence, sweeps_folders
from harness.util.errors import UserError, run_command
from harness.util.text import sanitize

Describe = Callable[[GroupValues, str], str]


def describe_model(values: GroupValues, comment: str) -> str:
    """Return the family, size and source of a model."""
    if values.get("family") == "hf":
        return comment
    return f"{values['family']}, {values['parameters'] / 1e6:,.1f} million parameters; {values['source']}"


def describe_strategy(values: GroupValues, comment: str) -> str:
    """Return the comment of a strategy's file, or its keys if it has none."""
    keys = ", ".join(f"{key}={value}" for key, value in values.items() if key != "name")
    return comment or keys or "one process"


def describe_by_comment(values: GroupValues, comment: str) -> str:
    """Return the comment at the top of a file."""
    return comment


LISTS: dict[str, tuple[Callable[[], dict[str, Path]], Describe]] = {
    "strategies": (lambda: files_in(conf_folders(), "strategy"), describe_strategy),
    "models": (lambda: files_in(conf_folders(), "model"), describe_model),
    "clusters": (lambda: files_in(conf_folders(), "cluster"), describe_by_comment),
    "sweeps": (lambda: files_in(sweeps_folders(), ""), describe_by_comment),
}


def listing(kind: str) -> Iterator[str]:
    """Yield one line for every entry of a kind: its name and what it is.

    Raises UserError for a file that cannot be read.
    """
    files, describe = LISTS[kind]
    paths = files()
    width = max((len(name) for name in paths), default=0)
    for name, path in paths.items():
        try:
            text = path.read_text()
            about = describe(yaml.safe_load(text) or {}, first_sentence(text))
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be listed: {error}") from None
        yield f"{sanitize(name):<{width}}  {sanitize(about)}".rstrip()


def plural(kind: str) -> str:
    """Return the kind that a group of the configuration has in this command: strategies for strategy."""
    return {"strategy": "strategies", "model": "models", "cluster": "clusters", "sweep": "sweeps"}.get(kind, kind)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness ls` and return its exit status."""
    parser = argparse.ArgumentParser(prog="harness ls", description="List what can be chosen on the command line.")
    parser.add_argument("kind", choices=list(LISTS), type=plural)
    options = parser.parse_args(arguments)

    def show() -> None:
        for line in listing(options.kind):
            print(line)

    return run_command(show)
