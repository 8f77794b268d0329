"""The columns of the comparison, the same for the terminal and the page."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.report.columns import ShownColumn, write
from harness.report.frame import RATIO_COLUMNS, baseline_name, column_values, distinct_values, varying_columns
from harness.report.labels import cell_text, column_title
from harness.report.text import ONE, format_numbers, format_ratios
from harness.util.text import sanitize

STALE_MARK, DISTURBED_MARK, UNSETTLED_MARK = "†", "‡", "~"

_SHORT_KINDS = {"selective": "sel", "attention": "attn"}  # of checkpointing

_DROP_NAMES = 100  # columns of names are left out after every number that may be


@dataclass(frozen=True)
class Word:
    """A word of a header, its abbreviation for the terminal, and the legend's explanation of the abbreviation."""

    full: str
    short: str
    meaning: str

    @property
    def on_one_line(self) -> str:
        """The abbreviation where a header has it on one line."""
        return self.short.replace("\n", " ")


_FILE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("comparison.toml").read_text("utf-8"))
WORDS = {name: Word(**word) for name, word in _FILE["words"].items()}
_DECLARED = {name: (facts.pop("header"), facts) for name, facts in _FILE["columns"].items()}


def comparison_columns(table: pd.DataFrame, short: bool) -> list[ShownColumn]:
    """Return the columns of the main table, without columns of numbers that are empty throughout.

    Eight come first, with those that vary beside them: strategy, ranks, speed, its ratio, peak memory, its ratio,
    communication and status. The others are extra.

    Args:
        table: The frame of the lines.
        short: Whether to abbreviate headers and kinds of checkpointing, for the terminal.
    """
    words = {name: word.short if short else word.full for name, word in WORDS.items()}
    marks = [UNSETTLED_MARK if unsettled else "" for unsettled in column_values(table, "unsettled")]
    ratios = format_ratios(column_values(table, "tokens_per_second_ratio"))
    texts = {
        "tokens_per_second": speed_texts(table),
        "tokens_per_second_ratio": [text and text + mark for text, mark in zip(ratios, marks, strict=True)],
        "status": _statuses(table),
    }
    hidden = set() if len(distinct_values(table, "grad_accumulation")) > 1 else {"grad_accumulation"}
    hidden |= set() if baseline_name(table) else {f"{name}_ratio" for name in RATIO_COLUMNS}
    columns = [
        ShownColumn(
            **({"key": name} | facts),
            header=header.format_map(words | {"unit": "{unit}"}),
            cells=texts.get(name) or column_values(table, name),
        )
        for name, (header, facts) in _DECLARED.items()
        if name not in hidden
    ]
    known = [column for column in columns if column.is_known]
    return write([*_names(table, short), *known], column_values(table, "is_ignored"))


def abbreviations(columns: Sequence[ShownColumn]) -> str:
    """Return a legend of the abbreviations and terms in the headers of these columns; empty if there are none."""
    titles = [column.title for column in columns]
    meanings: dict[str, list[str]] = {}
    for word in WORDS.values():
        if word.meaning and any(word.on_one_line in title for title in titles):
            meanings.setdefault(word.meaning, []).append(word.on_one_line)
    return "; ".join(f"{', '.join(words)}: {meaning}" for meaning, words in meanings.items())


def _names(table: pd.DataFrame, short: bool) -> list[ShownColumn]:
    """Return the columns that distinguish the rows; the number of ranks is shown even where all have the same."""
    columns = [ShownColumn("strategy", sanitized_texts(column_values(table, "strategy")), number=False)]
    if len(distinct_values(table, "checkpointing")) > 1:
        kinds = sanitized_texts(column_values(table, "checkpointing"))
        cells = [_SHORT_KINDS.get(kind, kind) if short else kind for kind in kinds]
        title = WORDS["checkpointing"].short if short else WORDS["checkpointing"].full
        columns.append(ShownColumn(title, cells, number=False))
    names = ["world_size", *(name for name in varying_columns(table) if name != "world_size")]
    return columns + [
        ShownColumn(
            column_title(name, short),
            sanitized_texts(column_values(table, name)),
            number=False,
            drop=_DROP_NAMES + len(names) - position,
            key=name,
        )
        for position, name in enumerate(names)
    ]


def speed_texts(table: pd.DataFrame) -> list[str]:
    """Return every speed with the range over its runs, or with their number where there are too few to rank it."""
    names = ("speed_low", "speed_high", "timed_runs", "is_ignored")
    medians = format_numbers(column_values(table, "tokens_per_second"), ONE)
    lows, highs, runs, ignored = (column_values(table, name) for name in names)
    return [
        text and text + _range_text(text, low, high, count or 1, is_ignored)
        for text, low, high, count, is_ignored in zip(medians, lows, highs, runs, ignored, strict=True)
    ]


def _range_text(median: str, low: float | None, high: float | None, runs: int, is_ignored: bool) -> str:
    """Return what stands behind a median: a mark if it is to be ignored, else its range or the number of its runs."""
    if is_ignored:
        return f" {DISTURBED_MARK}"
    return f" (n = {runs})" if low is None or high is None else f" [{_ends(low, high, median)}]"


def _ends(low: float, high: float, median: str) -> str:
    """Return a range with as many decimals as its median has."""
    decimals = len(median.partition(".")[2])
    return f"{low:,.{decimals}f}–{high:,.{decimals}f}"


def _statuses(table: pd.DataFrame) -> list[str]:
    """Return each line's status, how many of its runs have it if not all do, and the marks of the notes below."""
    parts = (column_values(table, name) for name in ("status", "runs", "runs_alike", "stale_reason", "is_ignored"))
    return [
        status
        + (f" {alike}/{runs}" if alike != runs else "")
        + (f" {STALE_MARK}" if stale else "")
        + (f" {DISTURBED_MARK}" if disturbed else "")
        for status, runs, alike, stale, disturbed in zip(*parts, strict=True)
    ]


def sanitized_texts(cells: Sequence[object]) -> list[str]:
    """Return values as texts that a terminal can print, empty where unknown."""
    return ["" if cell is None else sanitize(cell_text(cell)) for cell in cells]
