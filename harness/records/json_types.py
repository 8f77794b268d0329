"""The types of values of JSON: a check, made once from a type hint, that names what does not have its type.

A dataclass is read by FromJson, so that a key without a value has its default; a named tuple is an array.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from harness.config.from_dict import TYPE_NAMES, default_of
from harness.records.rank_report import FILE_KEYS

Check = Callable[
    [Any], str
]  # returns '' for a value of the type, else which part is not, such as ".layers.0 is not text"

MOST_NESTED = 60  # groups and lists in each other where any value may be: functions that walk through them recurse

LARGEST = 1e100  # of a number, so that sums and squares of numbers are finite


@cache
def type_check(hint: Any) -> Check:
    """Return the check for a type hint, which says nothing of a number's fraction and a Literal's choices."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_check(arguments[0])
    if origin is typing.Literal:  # other versions may have other choices
        kind: Any = type(arguments[0])
        return type_check(kind)
    if origin in (types.UnionType, typing.Union):
        return _any_check(tuple(map(type_check, arguments)))
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return _group_check(hint)
    if isinstance(hint, type) and issubclass(hint, tuple) and hint is not tuple:
        defaults = getattr(hint, "_field_defaults", {})
        return _array_check(tuple(map(type_check, typing.get_type_hints(hint).values())), len(defaults))
    if origin is tuple and arguments[1:] != (...,):
        return _array_check(tuple(map(type_check, arguments)), 0)
    if origin in (tuple, list, Sequence):
        return _entries_check(list, enumerate, type_check(arguments[0]))
    if origin in (dict, Mapping):
        return _entries_check(dict, _numbered_items if arguments[0] is int else dict.items, type_check(arguments[1]))
    return _plain_check if hint is Any else _scalar_check(hint)


def _any_check(checks: Sequence[Check]) -> Check:
    return lambda value: checks[0](value) if all(check(value) for check in checks) else ""


def _group_check(hint: Any) -> Check:
    """Return the check for a group of keys; those that the hint does not have may have any value.

    An older file may have the old key of a field.
    """
    required: frozenset[str] = (
        frozenset(
            FILE_KEYS.get(entry.name, entry.name)
            for entry in dataclasses.fields(hint)
            if default_of(entry) is dataclasses.MISSING and "old_key" not in entry.metadata
        )
        if dataclasses.is_dataclass(hint)
        else hint.__required_keys__
    )
    checks = {FILE_KEYS.get(name, name): type_check(kind) for name, kind in typing.get_type_hints(hint).items()}

    def check(value: Any) -> str:
        if type(value) is not dict:
            return f" is not {TYPE_NAMES[dict]}"
        for missing in required - value.keys():
            return f".{missing} is missing"
        for name, entry in value.items():
            if (entry is not None or name in required) and (problem := checks.get(name, _plain_check)(entry)):
                return f".{name}{problem}"
        return ""

    return check


def _array_check(checks: Sequence[Check], defaults: int) -> Check:
    def check(value: Any) -> str:
        if type(value) is not list or not len(checks) - defaults <= len(value) <= len(checks):
            return f" is not a list of {len(checks)}"
        problems = (f".{index}{problem}" for index, entry in enumerate(value) if (problem := checks[index](entry)))
        return next(problems, "")

    return check


def _entries_check(kind: type, items: Callable[[Any], Iterable[tuple[Any, Any]]], entry_check: Check) -> Check:
    name = TYPE_NAMES.get(kind, "a list")

    def check(value: Any) -> str:
        if type(value) is not kind:
            return f" is not {name}"
        for key, entry in items(value):
            if problem := entry_check(entry):
                return f".{key}{problem}"
        return ""

    return check


def _numbered_items(group: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the items of a group whose keys are whole numbers; a key that is none has a value of no type."""
    return ((key, entry if key.isdecimal() and len(key) < 20 else ()) for key, entry in group.items())


def _plain_check(value: Any, depth: int = 0) -> str:
    if depth > MOST_NESTED:
        return f" is nested more than {MOST_NESTED} times"
    entries = value.values() if type(value) is dict else value if type(value) is list else ()
    return next((problem for entry in entries if (problem := _plain_check(entry, depth + 1))), "")


def _scalar_check(kind: type) -> Check:
    problem = f" is not {TYPE_NAMES.get(kind, 'null')}"
    if kind in (int, float):  # a mean of whole numbers may have a fraction
        return lambda value: "" if type(value) in (int, float) and abs(value) < LARGEST else problem
    return lambda value: "" if type(value) is kind else problem
