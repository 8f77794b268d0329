"""The shape of every command: a table of its arguments, its mistakes as one line, and its exit status."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness.util.errors import run_command


class Argument(NamedTuple):
    """One argument of a command, as add_argument() of argparse takes it."""

    names: tuple[str, ...]
    options: dict[str, Any]


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument of a command."""
    return Argument(names, options)


def command(
    name: str, about: str, *table: Argument, epilog: str | None = None, takes_settings: bool = False
) -> Callable[[Callable[[Namespace], int | None]], Callable[[Sequence[str]], int]]:
    """Return a decorator that makes a function of the parsed options the `main(arguments)` of `harness NAME`.

    Besides the arguments the options have `settings`, the words that are none, which must be empty unless the command
    takes settings of runs, and `fail`, which ends the program with a mistake in the arguments.
    """

    def decorate(run: Callable[[Namespace], int | None]) -> Callable[[Sequence[str]], int]:
        def main(arguments: Sequence[str]) -> int:
            parser = ArgumentParser(prog=f"harness {name}", description=about, epilog=epilog)
            for names, options in table:
                parser.add_argument(*names, **options)
            parsed, settings = parser.parse_known_args(arguments, Namespace(fail=parser.error))
            if settings and not takes_settings:
                parser.error(f"unrecognized arguments: {' '.join(settings)}")
            parsed.settings = settings
            return run_command(lambda: run(parsed))

        return main

    return decorate
