"""The construction of frozen dataclasses from plain values, which checks keys and types and names the dotted key.

A field's type may be annotated with a rule for its values.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from harness.util.text import UserError, join_words

TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a group like {key: value}",
}
INT_LIMIT = 2**63  # files of rows and tensors have 64 bits for a whole number


T = TypeVar("T")


def from_dict(cls: type[T], values: Any, key: str = "") -> T:
    """Return an instance of a dataclass from plain values, recursively.

    Raises UserError that names the dotted key of a missing, unknown or wrongly typed value.
    """
    if not isinstance(values, dict):
        raise UserError(f"{key}={values} is not a group of keys: choose one of the files in conf/{key}")
    entries = _entries(cls)  # type: ignore[arg-type]  # a class is hashable
    new_names = {entry.metadata.get("old_key", name): name for name, (entry, _) in entries.items()}
    values = {new_names.get(name, name): value for name, value in values.items()}
    prefix = f"{key}." if key else ""
    for unknown in sorted(values.keys() - entries.keys()):
        raise UserError(f"{prefix}{unknown} is not a key: choose one of {', '.join(entries)}")
    for name, (entry, _) in entries.items():
        if name not in values and default_of(entry) is dataclasses.MISSING:
            raise UserError(f"{prefix}{name} is missing: give it a value")
    return cls(**{name: typed_value(entries[name][1], value, f"{prefix}{name}") for name, value in values.items()})


def typed_value(hint: Any, value: Any, key: str) -> Any:
    """Return a value as its type hint requires it: lists as tuples, whole numbers as floats. Raises UserError."""
    if is_group(hint):
        return from_dict(hint, value, key)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, int):
        require(-INT_LIMIT <= value < INT_LIMIT, key, value, "does not fit 64 bits: choose a smaller number")
    if origin is typing.Literal:
        arguments = type(arguments[0]), one_of(*arguments)
    if origin in (typing.Annotated, typing.Literal):
        kind, check = arguments
        checked = typed_value(kind, value, key)
        check(checked, key)
        return checked
    if origin in (types.UnionType, typing.Union):
        if type(value) in arguments:
            return value
        return typed_value(next(a for a in arguments if a is not type(None)), value, key)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        if len(value) == len(kinds):
            return tuple(typed_value(kind, v, key) for kind, v in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        require("_target_" not in str(value), key, value, "has a _target_, which names code to run: leave it out")
        return {str(k): typed_value(arguments[1], v, f"{key}.{k}") for k, v in value.items()}
    if hint is Any:
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = "a list" if origin in (tuple, list) else TYPE_NAMES.get(origin or hint, str(hint))
    raise UserError(f"{key}={value} is not {wanted}: give it {wanted}")


@cache
def _entries(cls: type) -> "dict[str, tuple[dataclasses.Field[Any], Any]]":
    """Return the field and the type, with its rule, of each key of a class, whose type hints are slow to resolve."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {entry.name: (entry, hints[entry.name]) for entry in dataclasses.fields(cls) if entry.init}


def default_of(entry: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, dataclasses.MISSING if there is none."""
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def is_group(hint: Any) -> bool:
    """Return whether the type of a key is a dataclass, so that the key is a group of keys."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


GroupValues = dict[str, Any]  # the values of one group; harness.config.from_dict checks their keys and types
# The values of a whole configuration, with the keys of RunConfig and CommandConfig; an old record may lack some.
ConfigValues = dict[str, Any]


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested groups as one mapping under dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def require(holds: bool, key: str, value: object, rule: str) -> None:
    """Raise UserError with the key, its value and the rule unless the rule holds."""
    if not holds:
        raise UserError(f"{key}={value} {rule}")


Rule = Callable[[Any, str], object]  # raises UserError for a value, of a key, that breaks it


def rule(holds: Callable[[Any], bool], text: str) -> Rule:
    """Return the rule that a value must keep; `text` says what is wrong with one that does not, and the remedy."""
    return lambda value, key: require(holds(value), key, value, text)


def one_of(*choices: object) -> Rule:
    """Return the rule that a value is one of these; the error lists them. The name of a group is what it is set to."""
    text = f"is not known: choose {', '.join(map(str, choices))}"
    return lambda value, key: require(value in choices, key.removesuffix(".name"), value, text)


Positive = Annotated[int, rule(lambda value: value >= 1, "is not a positive whole number: choose 1 or more")]
AtLeastOne = Annotated[int, rule(lambda value: value >= 1, "is not a positive number: choose 1 or more")]
NotNegative = Annotated[float, rule(lambda value: value >= 0, "is negative: choose 0 or more")]
Natural = Annotated[int, rule(lambda value: value >= 0, "is negative: choose 0 or more")]
Finite = Annotated[
    float, rule(lambda value: math.isfinite(value) and value >= 0, "is not a finite number of 0 or more: choose one")
]


def is_above_zero(value: float) -> bool:
    """Return whether a number is finite and above 0."""
    return math.isfinite(value) and value > 0


@cache
def divisors_text(number: int, is_proper: bool = False) -> str:
    """Return the divisors of a number for a sentence, such as "1, 2 or 4"; `is_proper` leaves out the number itself."""
    most = max(1, number - is_proper)
    return join_words([str(d) for d in range(1, most + 1) if number % d == 0], "or")
