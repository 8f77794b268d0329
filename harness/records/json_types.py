"""The types of values of JSON: a check, made once from a type hint, that names what does not have its type.

A dataclass is read by FromJson, so that a key without a value has its default; a named tuple is an array.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from harness.config.from_dict import TYPE_NAMES, default_of
from harness.records.rank_report import FILE_KEYS

# Returns '' for a value of the type, else what is not of it, such as ".layers.0 is not text".
Check = Callable[[Any], str]

MOST_NESTED = 60  # groups and lists in each other where any value may be: functions that walk through them recurse

LARGEST = 1e100  # of a number, so that sums and squares of numbers are finite


@cache
def type_check(hint: Any) -> Check:
    """Return the check for a type hint, which says nothing of a number's fraction and a Literal's choices."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:  # other versions may have other choices
        return _scalar_check(type(arguments[0]))
    if origin in (types.UnionType, typing.Union):
        checks = tuple(map(type_check, arguments))
        return lambda value: checks[0](value) if all(check(value) for check in checks) else ""
    if typing.is_typeddict(hint):
        return group_check(typing.get_type_hints(hint), hint.__required_keys__)
    if dataclasses.is_dataclass(hint):  # an older file may have the old key of a field
        absent = (entry for entry in dataclasses.fields(hint) if default_of(entry) is dataclasses.MISSING)
        required = {entry.name for entry in absent if "old_key" not in entry.metadata}
        return group_check(typing.get_type_hints(hint), required)
    if hasattr(hint, "_fields") or (origin is tuple and arguments[1:] != (...,)):
        kinds = typing.get_type_hints(hint).values() if hasattr(hint, "_fields") else arguments
        return _array_check(tuple(map(type_check, kinds)), len(getattr(hint, "_field_defaults", ())))
    if origin in (tuple, list, Sequence):
        return list_check(type_check(arguments[0]))
    if origin in (dict, Mapping):
        return _entries_check(dict, _numbered_items if arguments[0] is int else dict.items, type_check(arguments[1]))
    return _plain_check if hint is Any else _scalar_check(hint)


def group_check(hints: Mapping[str, Any], required: Collection[str] = ()) -> Check:
    """Return the check for a group of keys by their hints; other keys may have any value."""
    needed = {FILE_KEYS.get(name, name) for name in required}
    checks = {FILE_KEYS.get(name, name): type_check(kind) for name, kind in hints.items()}

    def check(value: Any) -> str:
        if type(value) is not dict:
            return f" is not {TYPE_NAMES[dict]}"
        for missing in needed - value.keys():
            return f".{missing} is missing"
        for name, entry in value.items():
            if (entry is not None or name in needed) and (problem := checks.get(name, _plain_check)(entry)):
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
    def check(value: Any) -> str:
        if type(value) is not kind:
            return f" is not {TYPE_NAMES.get(kind, 'a list')}"
        return next((f".{key}{problem}" for key, entry in items(value) if (problem := entry_check(entry))), "")

    return check


def list_check(entry_check: Check) -> Check:
    """Return the check for a list by that of its entries."""
    return _entries_check(list, enumerate, entry_check)


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
