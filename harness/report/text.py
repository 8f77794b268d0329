"""Numbers, sizes, lists and facts as text; `sentences.j2` has a macro for each kind of fact, which gets its values."""

import datetime
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cost_model.timing.interval import TIE
from harness.report.speeds import CROWDED, MINIMUM_RUNS
from harness.util.sentences import Sentences
from harness.util.text import BINARY, count_text, join_words


@dataclass(frozen=True)
class Unit:
    """A unit that the numbers of a column are written in."""

    name: str
    size: float  # in the column's own unit
    decimals: int | None = None  # as many as the largest number needs for three significant figures, if not given


MILLISECONDS = Unit("ms", 1e-3)  # of seconds

ONE = Unit("", 1)

RATIO, FRACTION, PERCENT = Unit("", 1, 2), Unit("", 1, 3), Unit("", 0.01, 1)  # fractions are small ratios, such as 1/64

BYTES = (*(Unit(name, size) for name, size in BINARY.items()), Unit("B", 1, 0))

FLOPS = (Unit("PFLOP", 1e15), Unit("TFLOP", 1e12), Unit("GFLOP", 1e9), Unit("MFLOP", 1e6))


def unit_of(numbers: Sequence[float | None], units: Sequence[Unit]) -> Unit:
    """Return the unit for all these numbers: the largest in which the largest number is at least 1, or the last."""
    return next((unit for unit in units if _largest(numbers) >= unit.size), units[-1])


def _largest(numbers: Sequence[float | None]) -> float:
    return max((abs(number) for number in numbers if number is not None), default=0)


def byte_unit(numbers: Sequence[float | None]) -> Unit:
    """Return the unit for a whole table of bytes."""
    return unit_of(numbers, BYTES)


def bytes_text(size: float, units: Sequence[Unit] = BYTES) -> str:
    """Return one size as text, of bytes or with other units, in the one that suits it."""
    unit = unit_of([size], units)
    return f"{format_numbers([size], unit)[0]} {unit.name}"


def format_numbers(numbers: Sequence[float | None], unit: Unit) -> list[str]:
    """Return a column of numbers with the decimals of their unit.

    An unknown number is the empty string. A number that is not zero is never written as zero.
    """
    decimals = _decimals(_largest(numbers), unit)
    return ["" if number is None else _format_number(number / unit.size, decimals) for number in numbers]


def _decimals(largest: float, unit: Unit) -> int:
    needed = sum(largest < limit * unit.size for limit in (100, 1000))
    return needed if unit.decimals is None else unit.decimals


def _format_number(number: float, decimals: int) -> str:
    smallest = 10.0**-decimals
    return f"<{smallest:.{decimals}f}" if 0 < number < smallest / 2 else f"{number:,.{decimals}f}"


def rounded_up(size: int, unit: Unit) -> str:
    """Return a size in bytes with a unit, rounded up, so that what is recommended for so much memory does fit in it."""
    decimals = _decimals(size, unit)
    return f"{math.ceil(size / unit.size * 10**decimals) / 10**decimals:,.{decimals}f} {unit.name}"


def deviation_text(number: float | None) -> str:
    """Return a relative difference in the form 1.2e-7; empty where it is unknown."""
    if not number:
        return "" if number is None else "0"
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def duration_text(seconds: float) -> str:
    """Return a duration for a sentence with three significant figures: in ms, or from one second on in s."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def percent_text(share: float) -> str:
    """Return a share as a percentage for a sentence: one decimal below 10 %, none above."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def at_most(parts: Sequence[str], most: int) -> list[str]:
    """Return the first of the parts, and behind them how many more there are."""
    return [*parts[:most], f"{len(parts) - most} more"] if len(parts) > most else list(parts)


def span_text(ordered: Sequence[Any]) -> str:
    """Return the ends of ordered values, as in "3 to 5", or the one value that all have."""
    return " to ".join(dict.fromkeys((str(ordered[0]), str(ordered[-1]))))


def rounded_count(count: int) -> str:
    """Return a number of parameters with one decimal, such as 0.5 M."""
    return f"{count / 1e9:,.1f} B" if count >= 10**9 else f"{count / 1e6:.1f} M" if count >= 10**5 else str(count)


def day_text(day: str) -> str:
    """Return a day such as 2026-11-24 as 24 November 2026, and anything else as it is."""
    with suppress(ValueError):
        date = datetime.date.fromisoformat(day)
        return f"{date.day} {date:%B %Y}"
    return day


MOST_LABELS = 6  # that a note lists


def sentence(kind: str, /, **values: Any) -> str:
    """Return the sentence, or the sentences, on a fact of a kind: what the macro of that name says of the values."""
    return _MACROS(kind, **values)


def labels_text(labels: Sequence[str], total: int, most: int = MOST_LABELS) -> str:
    """Return the labels of the rows that a note is about, or their number if there are many."""
    if len(labels) <= most:
        return ", ".join(labels)
    return f"all {total} configurations" if len(labels) == total else f"{len(labels)} of {total} configurations"


_MACROS = Sentences(
    Path(__file__).with_name("sentences.j2"),
    {
        "among": lambda number, others, unit: format_numbers([*others, number], unit)[-1],
        "at_most": at_most,
        "byte_unit": byte_unit,
        "bytes": bytes_text,
        "capitalized": lambda text: text[:1].upper() + text[1:],
        "day": day_text,
        "duration": duration_text,
        "flops": lambda count: bytes_text(count, FLOPS),
        "grouped": "{:,.0f}".format,
        "labels": labels_text,
        "percent": percent_text,
        "plural": count_text,
        "ratio": lambda number: format_numbers([number], RATIO)[0],
        "rounded_count": rounded_count,
        "rounded_up": lambda size: rounded_up(size, byte_unit([size])),
        "span": span_text,
        "words": join_words,
    },
    {"crowded": CROWDED, "minimum_runs": MINIMUM_RUNS, "tie": TIE},
)
