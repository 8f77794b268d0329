"""The construction of frozen dataclasses from plain values, which checks keys and types and names the dotted key."""

import dataclasses
import types
import typing
from functools import cache
from typing import Any

from harness.config.validation import require_one_of
from harness.util.errors import UserError

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def from_dict(cls: type, values: Any, key: str = "") -> Any:
    """Return an instance of a dataclass from plain values, recursively.

    Raises UserError that names the dotted key of a missing, unknown or wrongly typed value.
    """
    if not dataclasses.is_dataclass(cls):
        return _checked_value(cls, values, key)
    if not isinstance(values, dict):
        raise UserError(f"{key}={values} is not a group of keys: choose one of the files in conf/{key}")
    keys = _keys(cls)
    values = {keys.new_names.get(name, name): value for name, value in values.items()}
    for unknown in sorted(values.keys() - keys.hints.keys()):
        raise UserError(f"{_dotted_key(key, unknown)} is not a key: choose one of {', '.join(keys.hints)}")
    for name in keys.required:
        if name not in values:
            raise UserError(f"{_dotted_key(key, name)} is missing: give it a value")
    return cls(**{name: from_dict(keys.hints[name], values[name], _dotted_key(key, name)) for name in values})


class _Keys(typing.NamedTuple):
    """The keys of a group: the fields of its dataclass."""

    hints: dict[str, Any]  # the type of each key
    required: tuple[str, ...]
    new_names: dict[str, str]  # by the name that old records have


@cache
def _keys(cls: type) -> _Keys:
    """Return the keys of a class, whose type hints are slow to resolve."""
    fields = dataclasses.fields(cls)
    hints = typing.get_type_hints(cls)
    return _Keys(
        {entry.name: hints[entry.name] for entry in fields},
        tuple(
            entry.name
            for entry in fields
            if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        ),
        {entry.metadata["old_key"]: entry.name for entry in fields if "old_key" in entry.metadata},
    )


def _dotted_key(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _checked_value(hint: Any, value: Any, key: str) -> Any:
    """Return a value as its type hint requires it: lists as tuples, whole numbers as floats. Raises UserError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        _checked_value(type(arguments[0]), value, key)
        require_one_of(key.removesuffix(".name"), value, arguments)  # a group's name is what the group is set to
        return value
    if origin is types.UnionType:
        if value is None and type(None) in arguments:
            return None
        if type(value) in arguments:
            return value
        return from_dict(next(a for a in arguments if a is not type(None)), value, key)
    if origin is tuple and isinstance(value, (list, tuple)) and arguments[1:] == (...,):
        return tuple(from_dict(arguments[0], v, key) for v in value)
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(_checked_value(a, v, key) for a, v in zip(arguments, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {
            str(k): v if arguments[1] is Any else _checked_value(arguments[1], v, f"{key}.{k}")
            for k, v in value.items()
        }
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    if origin in (tuple, list):
        raise UserError(f"{key}={value} is not a list: give it a list")
    wanted = TYPE_NAMES.get(hint, str(hint))
    raise UserError(f"{key}={value} is not {wanted}: give it {wanted}")
