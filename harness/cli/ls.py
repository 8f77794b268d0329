"""harness ls strategies|models|clusters|sweeps: the names that a group has, with one line about each."""

from argparse import Namespace
from collections.abc import Iterator

import yaml

from harness.cli.commands import KINDS
from harness.config.from_dict import GroupValues
from harness.config.locations import files_in, first_sentence
from harness.util.text import UserError, sanitize


def describe(kind: str, values: GroupValues, comment: str) -> str:
    """Return one line on a file: size and source of a model, else the comment at its top, else a strategy's keys."""
    if kind == "models" and values.get("family") != "hf":
        return f"{values['family']}, {values['parameters'] / 1e6:,.1f} million parameters; {values['source']}"
    if kind == "strategies" and not comment:
        return ", ".join(f"{key}={value}" for key, value in values.items() if key != "name") or "one process"
    return comment


def listing(kind: str) -> Iterator[str]:
    """Yield one line for every entry of a kind: its name and what it is.

    Raises UserError for a file that cannot be read.
    """
    paths = files_in(kind if kind == "sweeps" else KINDS[kind])
    width = max((len(name) for name in paths), default=0)
    for name, path in paths.items():
        try:
            text = path.read_text()
            about = describe(kind, yaml.safe_load(text) or {}, first_sentence(text))
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be listed: {error}") from None
        yield f"{sanitize(name):<{width}}  {sanitize(about)}".rstrip()


def main(options: Namespace) -> None:
    """Print the names of a kind, with one line about each."""
    for line in listing(options.kind):
        print(line)
