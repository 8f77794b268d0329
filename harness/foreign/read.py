"""The values of a configuration file or a launch line of another program, and the format that they are of."""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from harness.util.text import UserError, one_line

FOLDER = Path(__file__).with_name("tables")

FILES = ("deepspeed", "accelerate", "torchtitan", "trainer", "axolotl")  # the formats of files, in the order of ties

SCRIPTS = ("trainer", "megatron", "torchtitan")  # those of a script's options

# What starts ranks, by the format of its options; python starts them by a module.
LAUNCHERS = {
    "accelerate": "accelerate",
    **dict.fromkeys(("torchrun", "deepspeed", "srun", "mpirun", "python"), "torchrun"),
}


@dataclass(frozen=True)
class Source:
    """The values of one file, of one part of a launch line, or of a group in either."""

    format: str  # the name of a table
    values: Mapping[str, Any]
    path: Path = Path()  # of the file, in whose folder it names further ones


@cache
def table(name: str) -> dict[str, Any]:
    """Return a table of equivalents, with the keys of the one that it extends."""
    own = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
    base = table(own["extends"]) if "extends" in own else {}
    merged = {key: own.get(key, {}) | base.get(key, {}) | own.get(key, {}) for key in ("rules", "groups")}
    return base | own | merged | {"nothing": (*own.get("nothing", ()), *base.get("nothing", ()))}


def match(patterns: Iterable[str], key: str) -> str | None:
    """Return the key itself if it is among the patterns, else the first that fits it, None if none does."""
    return key if key in patterns else next((pattern for pattern in patterns if fnmatchcase(key, pattern)), None)


def is_known(name: str, key: str) -> bool:
    """Return whether a format has a key."""
    return match((*table(name)["rules"], *table(name)["nothing"]), key) is not None


def flat(name: str, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a format with their values, without those that are null.

    Groups that the format opens have keys of their own; what is another format's stays as it is.
    """
    rules, groups = table(name)["rules"], table(name)["groups"]
    for word, text in values.items():
        key, value = f"{prefix}{word}", plain(text)
        if not isinstance(value, dict) or "@" in str(rules.get(key)):
            yield from () if value is None else [(key, value)]
        elif key in groups:
            start = groups[key]
            yield from flat(name, {f"{start}{str(inner).removeprefix(start)}": value[inner] for inner in value})
        else:
            yield from flat(name, value, f"{key}.")


def plain(value: Any) -> Any:
    """Return the number, truth, list or group that a text stands for, else the value as it is."""
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?", value):
        return float(value)
    try:
        return json.loads(value.lower() if value.lower() in ("true", "false") else value)
    except ValueError:
        return value


def best_format(values: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the format that knows most of the keys; None if none knows any."""
    known = {name: sum(is_known(name, key) for key, _ in flat(name, values)) for name in names}
    return max(known, key=lambda name: known[name]) if any(known.values()) else None


def read_file(path: Path, name: str | None = None) -> Source:
    """Return the values of a file, whose format is the one that knows most of its keys unless it is named.

    Raises UserError for a file that cannot be read, or is of no format.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".json": json.loads,
        ".toml": tomllib.loads,
        ".py": _arguments_of_script,
    }
    try:
        text = path.read_text("utf-8")
        values = readers.get(path.suffix, yaml.safe_load)(text)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, SyntaxError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not valid {path.suffix[1:] or 'text'}: {one_line(error)}") from None
    remedy = f"name a file of {', '.join(table(entry)['name'] for entry in FILES)}, or put a launch line after --"
    if not isinstance(values, dict):
        raise UserError(f"{path} has no keys: {remedy}")
    if "model_type" in values and "architectures" in values:
        raise UserError(f"{path} is the configuration of a model: type harness plan model={path}")
    name = name or best_format(values, FILES)
    if name is None:
        raise UserError(f"{path} has no key that is known: {remedy}")
    return Source(name, values, path)


def _arguments_of_script(text: str) -> dict[str, Any]:
    """Return the arguments of TrainingArguments in a script, or of its dict ARGUMENTS, with its other plain values."""
    values: dict[str, Any] = {}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Assign(targets=[ast.Name(id="ARGUMENTS")], value=ast.Call() as call):
                values |= _value(call)
            case ast.Assign(targets=[ast.Name(id=("MODEL" | "PRODUCTS") as name)], value=value):
                values[name] = _value(value)
            case ast.Call() if node.keywords and ast.unparse(node.func).endswith("TrainingArguments"):
                values |= _value(node)
    return values


def _value(node: ast.expr) -> Any:
    """Return an expression's value: of a call its keywords, of what only Python knows its last text, or its source."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        if isinstance(node, ast.Call) and node.keywords:
            return {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
        texts = [
            part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        return texts[-1] if texts else ast.unparse(node)


def read_line(words: Sequence[str]) -> list[Source]:
    """Return the values of a launch line: those of its script, which count before those of what starts it."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", word) and word != "\\"]
    launchers = [name for word in words if (name := Path(word).name.rstrip("0123456789.")) in LAUNCHERS]
    scripts = (place for place, word in enumerate(words) if word.endswith((".py", ".sh")) or _is_module(words, place))
    script = next(scripts, len(words) if launchers else -1)
    values, starting = option_values(words[script + 1 :]), words[: max(script, 0)]
    launcher = "accelerate" if "accelerate" in launchers else "torchrun"
    return [
        *([Source(best_format(values, SCRIPTS) or SCRIPTS[0], values)] if values else ()),
        Source(launcher, option_values(starting, (*LAUNCHERS, "launch"))),
    ]


def _is_module(words: Sequence[str], place: int) -> bool:
    """Return whether a word is a module that Python or a launcher runs, and not itself what starts ranks."""
    return place > 0 and words[place - 1] in ("-m", "--module") and not words[place].startswith("torch.distributed")


def option_values(words: Sequence[str], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return options by their names with `_` for `-`: true for one without a value, several values as one text."""
    values: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            option, equals, value = word.lstrip("-").partition("=")
            name = option.replace("-", "_")
            values[name] = value if equals else True
        elif name is not None:
            values[name] = word if values[name] is True else f"{values[name]} {word}"
        elif Path(word).name.rstrip("0123456789.") not in ignored:
            values[word] = True
    return values
