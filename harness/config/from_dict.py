"""The construction of frozen dataclasses from plain values, which checks keys and types and names the dotted key."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any, TypedDict, TypeVar

from harness.util.errors import UserError

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
    built: T = _from_values(cls, values, key)
    return built


def _from_values(cls: type, values: Any, key: str) -> Any:
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
    return cls(**{name: _from_values(keys.hints[name], values[name], _dotted_key(key, name)) for name in values})


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
    if isinstance(value, int):
        require(-INT_LIMIT <= value < INT_LIMIT, key, value, "does not fit 64 bits: choose a smaller number")
    if hint is Any:
        return value
    if origin is typing.Literal:
        _checked_value(type(arguments[0]), value, key)
        require_one_of(key.removesuffix(".name"), value, arguments)  # a group's name is what the group is set to
        return value
    if origin is types.UnionType:
        if value is None and type(None) in arguments:
            return None
        if type(value) in arguments:
            return value
        return _from_values(next(a for a in arguments if a is not type(None)), value, key)
    if origin is tuple and isinstance(value, (list, tuple)) and arguments[1:] == (...,):
        return tuple(_from_values(arguments[0], v, key) for v in value)
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(_checked_value(a, v, key) for a, v in zip(arguments, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {str(k): _checked_value(arguments[1], v, f"{key}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    if origin in (tuple, list):
        raise UserError(f"{key}={value} is not a list: give it a list")
    wanted = TYPE_NAMES.get(origin or hint, str(hint))
    raise UserError(f"{key}={value} is not {wanted}: give it {wanted}")


GroupValues = dict[str, Any]  # the values of one group; harness.config.from_dict checks their keys and types


class ConfigValues(TypedDict, total=False):
    """The keys of a whole configuration: those of RunConfig and those of CommandConfig.

    A group or a key may be missing in the record of an earlier version.
    """

    name: str
    results_dir: str
    proof: GroupValues
    tracking: GroupValues
    measure: GroupValues
    sweep: GroupValues
    plan: GroupValues
    repeats: int
    timeout_seconds: float
    hang_seconds: float
    preflight: bool
    retry: Sequence[str]
    stop_after: Sequence[str | int | float]
    force: bool
    model: GroupValues
    strategy: GroupValues
    checkpointing: GroupValues
    precision: GroupValues
    data: GroupValues
    cluster: GroupValues
    train: GroupValues
    world_size: int | None
    repeat: int
    launch: str
    simulate: GroupValues


def require(holds: bool, key: str, value: object, rule: str) -> None:
    """Raise UserError with the key, its value and the rule unless the rule holds."""
    if not holds:
        raise UserError(f"{key}={value} {rule}")


def require_positive(group: str, owner: object, *keys: str) -> None:
    """Raise UserError unless each of these attributes of a group's dataclass is 1 or more."""
    for key in keys:
        value = getattr(owner, key)
        require(value >= 1, f"{group}.{key}", value, "is not a positive whole number: choose 1 or more")


def require_one_of(key: str, value: object, choices: Sequence[object]) -> None:
    """Raise UserError, which lists the choices, unless the value is one of them."""
    require(value in choices, key, value, f"is not known: choose {', '.join(map(str, choices))}")


def divisors_text(number: int) -> str:
    """Return the divisors of a number for a sentence, such as "1, 2 or 4"."""
    divisors = [str(d) for d in range(1, number + 1) if number % d == 0]
    return divisors[0] if len(divisors) == 1 else ", ".join(divisors[:-1]) + " or " + divisors[-1]
