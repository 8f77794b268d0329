"""The report's sentences: `sentences.j2` says each kind of fact, in a macro that gets the values of the fact."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.report.speeds import CROWDED, MINIMUM_RUNS
from harness.report.text import (
    FLOPS,
    RATIO,
    at_most,
    byte_unit,
    bytes_text,
    duration_text,
    format_numbers,
    percent_text,
    rounded_up,
    span_text,
)
from harness.util.sentences import Sentences
from harness.util.text import count_text, join_words

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
        "duration": duration_text,
        "flops": lambda count: bytes_text(count, FLOPS),
        "grouped": "{:,.0f}".format,
        "labels": labels_text,
        "percent": percent_text,
        "plural": count_text,
        "ratio": lambda number: format_numbers([number], RATIO)[0],
        "rounded_up": lambda size: rounded_up(size, byte_unit([size])),
        "span": span_text,
        "words": join_words,
    },
    {"crowded": CROWDED, "minimum_runs": MINIMUM_RUNS},
)
