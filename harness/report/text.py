"""Numbers, sizes and lists as text: a whole column in one unit, a percentage, an enumeration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.byte_size import BINARY
from harness.records.schema import Row


@dataclass(frozen=True)
class Unit:
    """A unit that the numbers of a column are written in."""

    name: str
    size: float  # in the column's own unit


MILLISECONDS = Unit("ms", 1e-3)  # of seconds

ONE = Unit("", 1)


def byte_unit(numbers: Sequence[float | None]) -> Unit:
    """Return the unit for a whole table of bytes: the largest in which the largest number is at least 1."""
    largest = max((abs(number) for number in numbers if number is not None), default=0)
    for name, size in BINARY.items():
        if largest >= size:
            return Unit(name, size)
    return Unit("B", 1)


def flop_unit(numbers: Sequence[float | None]) -> Unit:
    """Return the unit for a whole column of FLOPs: the largest in which the largest number is at least 1."""
    largest = max((number for number in numbers if number is not None), default=0)
    sizes = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9))
    return next((Unit(name, size) for name, size in sizes if largest >= size), Unit("MFLOP", 1e6))


def bytes_text(size: float) -> str:
    """Return one size in bytes as text, in the unit that suits it."""
    unit = byte_unit([size])
    return f"{format_numbers([size], unit)[0]} {unit.name}"


def flops_text(count: float) -> str:
    """Return one number of FLOPs as text, in the unit that suits it."""
    unit = flop_unit([count])
    return f"{format_numbers([count], unit)[0]} {unit.name}s"


def format_numbers(numbers: Sequence[float | None], unit: Unit) -> list[str]:
    """Return a column of numbers with as many decimals as its largest needs for three significant figures.

    An unknown number is the empty string. A number that is not zero is never written as zero.
    """
    largest = max((abs(number) for number in numbers if number is not None), default=0) / unit.size
    decimals = 0 if largest >= 1000 or unit.name == "B" else 1 if largest >= 100 else 2
    return [_format_number(number, unit.size, decimals) for number in numbers]


def rounded_up(size: int, unit: Unit) -> str:
    """Return a size in bytes with a unit, rounded up, so that what is recommended for so much memory does fit in it."""
    number = size / unit.size
    decimals = 0 if number >= 1000 or unit.name == "B" else 1 if number >= 100 else 2
    return f"{math.ceil(number * 10**decimals) / 10**decimals:,.{decimals}f} {unit.name}"


def format_ratios(numbers: Sequence[float | None]) -> list[str]:
    """Return ratios with two decimals."""
    return [_format_number(number, 1, 2) for number in numbers]


def format_fractions(numbers: Sequence[float | None]) -> list[str]:
    """Return small ratios, such as a pipeline bubble of 1/64, with three decimals."""
    return [_format_number(number, 1, 3) for number in numbers]


def format_percents(numbers: Sequence[float | None]) -> list[str]:
    """Return shares as percentages with one decimal, without the sign."""
    return [_format_number(number, 0.01, 1) for number in numbers]


def _format_number(number: float | None, size: float, decimals: int) -> str:
    if number is None:
        return ""
    smallest = 10.0**-decimals
    if 0 < number / size < smallest / 2:
        return f"<{smallest:.{decimals}f}"
    return f"{number / size:,.{decimals}f}"


def format_deviations(numbers: Sequence[float | None]) -> list[str]:
    """Return relative differences in the form 1.2e-7."""
    return ["" if number is None else _format_deviation(number) for number in numbers]


def _format_deviation(number: float) -> str:
    if number == 0:
        return "0"
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def duration_text(seconds: float) -> str:
    """Return a duration for a sentence with three significant figures: in ms, or from one second on in s."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def outcome_text(row: Row) -> str:
    """Return the status of a row that is not ok, with the reason."""
    return f"{row['status']}: {row.get('reason') or 'no reason recorded'}"


def pluralize(number: int, noun: str) -> str:
    """Return the number with its noun: "1 line", "2 lines"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def percent_text(share: float) -> str:
    """Return a share as a percentage for a sentence: one decimal below 10 %, none above."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def join_words(parts: Sequence[str]) -> str:
    """Return an enumeration: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def at_most(parts: Sequence[str], most: int) -> list[str]:
    """Return the first of the parts, and behind them how many more there are."""
    return [*parts[:most], f"{len(parts) - most} more"] if len(parts) > most else list(parts)


def span_text(ordered: Sequence[Any]) -> str:
    """Return the ends of ordered values, as in "3 to 5", or the one value that all have."""
    return " to ".join(dict.fromkeys((str(ordered[0]), str(ordered[-1]))))
