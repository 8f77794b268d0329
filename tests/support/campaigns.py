"""Commands that measure case after case: their options, and the tables that keep what they measured."""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from harness.util.files import atomic_write_text

Line = dict[str, Any]

Case = TypeVar("Case", bound=tuple[Any, ...])

REQUIRED_PATH = {"type": Path, "required": True}

FLAG = {"action": "store_true"}


def parse_options(description: str | None, **options: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options of this process's command, each given by name as add_argument of argparse takes it.

    An option without a type has that of its default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, settings in options.items():
        typed = {"type": type(settings["default"])} if "default" in settings else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **typed | settings)
    return parser.parse_args()


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table, none if there is no file."""
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records") if path.exists() else []


def write_table(path: Path, columns: Iterable[str], lines: Iterable[Mapping[str, Any]]) -> None:
    """Write these columns of the lines; a value that is missing is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(list(lines), columns=list(columns), dtype=object)
    atomic_write_text(path, table.to_csv(index=False, lineterminator="\n"))


def complete_table(
    path: Path,
    columns: Sequence[str],
    keys: Sequence[str],
    cases: Iterable[Case],
    run: Callable[[Case], Line],
    is_right: Callable[[Line], bool],
) -> None:
    """Run each case that a table lacks, by the values of its `keys`, and write the table after each.

    The process ends with an error if a case ended as it should not.
    """
    lines: list[Line] = [*read_table(path)]
    finished = {tuple(line[name] for name in keys) for line in lines}
    wrong = 0
    for case in (case for case in cases if case not in finished):
        started = time.monotonic()
        lines.append(run(case))
        write_table(path, columns, lines)
        word = "right" if is_right(lines[-1]) else "WRONG"
        wrong += word == "WRONG"
        print(f"{word} {time.monotonic() - started:.0f} s {lines[-1]}", flush=True)
    raise SystemExit(wrong > 0)
