"""Checks of configured values, whose errors name the dotted key, the value, the rule and the remedy."""

from collections.abc import Sequence

from harness.util.errors import UserError


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
