"""What a configured value must be; a complaint names its dotted key, the value, the rule and the remedy."""

from collections.abc import Sequence

from harness.util.errors import UserError


def require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise UserError(f"{key}={value} {rule}")


def require_positive(group: str, owner: object, *keys: str) -> None:
    for key in keys:
        value = getattr(owner, key)
        require(value >= 1, f"{group}.{key}", value, "is not a positive whole number: choose 1 or more")


def require_one_of(key: str, value: object, choices: Sequence[object]) -> None:
    require(value in choices, key, value, f"is not known: choose {', '.join(map(str, choices))}")


def divisors_text(number: int) -> str:
    """For a sentence: 1, 2 or 4."""
    found = [str(d) for d in range(1, number + 1) if number % d == 0]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + " or " + found[-1]
