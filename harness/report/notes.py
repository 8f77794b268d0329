"""Notes that many rows share: causes of the same kind as one, and rows by their number where there are many."""

import re
from collections.abc import Iterable, Sequence

MOST_LABELS = 6  # that a note lists

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def labels_text(labels: Sequence[str], total: int, most: int = MOST_LABELS) -> str:
    """Return the labels of the rows that a note is about, or their number if there are many."""
    if len(labels) <= most:
        return ", ".join(labels)
    return f"all {total} configurations" if len(labels) == total else f"{len(labels)} of {total} configurations"


def by_kind(causes: Iterable[tuple[str, str]], separator: str = "; ") -> dict[str, list[str]]:
    """Return the labels of rows by the kind of their causes.

    Args:
        causes: Labels with their causes. Phrases of causes that differ in a number alone are of one kind, whose text
            has the range of that number.
        separator: What joins the phrases of a cause.
    """
    kinds: dict[str, list[tuple[str, list[str]]]] = {}
    for label, cause in causes:
        for phrase in cause.split(separator):
            kinds.setdefault(_NUMBER.sub("#", phrase), []).append((label, _NUMBER.findall(phrase)))
    return {
        _with_ranges(kind, [numbers for _, numbers in entries]): list(dict.fromkeys(label for label, _ in entries))
        for kind, entries in kinds.items()
    }


def _with_ranges(kind: str, numbers: Sequence[Sequence[str]]) -> str:
    """Return the text of a kind, with a range in the place of every number that differs."""
    ranges = []
    for position in zip(*numbers, strict=True):
        ordered = sorted(set(position), key=float)
        ranges.append(ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}")
    first, *rest = kind.split("#")
    return first + "".join(number + text for number, text in zip(ranges, rest, strict=True))
