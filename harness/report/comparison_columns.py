"""The columns of the comparison, the same for the terminal and the page."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.report.columns import ShownColumn, write
from harness.report.labels import cell_text, column_title
from harness.report.lines import RATIO_COLUMNS, Line, baseline_name, column_values, distinct_values, rows_of
from harness.report.settings import varying_columns
from harness.report.text import ONE, RATIO, format_numbers
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
_DECLARED = {
    name: (facts.pop("header"), facts.pop("is_timed", False), facts) for name, facts in _FILE["columns"].items()
}


def comparison_columns(lines: Sequence[Line], short: bool) -> list[ShownColumn]:
    """Return the columns of the main table, without columns of numbers that are empty throughout.

    Eight come first, with those that vary beside them: strategy, ranks, speed, its ratio, peak memory, its ratio,
    communication and status. The others are extra.

    Args:
        lines: The lines.
        short: Whether to abbreviate headers and kinds of checkpointing, for the terminal.
    """
    words = {name: word.short if short else word.full for name, word in WORDS.items()}
    marks = [UNSETTLED_MARK if line.get("unsettled") else "" for line in lines]
    ratios = format_numbers(column_values(lines, "tokens_per_second_ratio"), RATIO)
    ignored = column_values(lines, "is_ignored")
    texts = {
        "tokens_per_second": speed_texts(lines),
        "tokens_per_second_ratio": [text and text + mark for text, mark in zip(ratios, marks, strict=True)],
        "status": [_status(line) for line in lines],
    }
    hidden = set() if len(distinct_values(lines, "grad_accumulation")) > 1 else {"grad_accumulation"}
    hidden |= set() if baseline_name(lines) else {f"{name}_ratio" for name in RATIO_COLUMNS}
    columns = [
        ShownColumn(
            **({"key": name} | facts),
            header=header.format_map(words | {"unit": "{unit}"}),
            cells=texts.get(name) or column_values(lines, name),
            ignored=ignored if is_timed else (),
        )
        for name, (header, is_timed, facts) in _DECLARED.items()
        if name not in hidden
    ]
    known = [column for column in columns if column.is_known]
    return write([*_names(lines, short), *known])


def abbreviations(columns: Sequence[ShownColumn]) -> str:
    """Return a legend of the abbreviations and terms in the headers of these columns; empty if there are none."""
    titles = [column.title for column in columns]
    meanings: dict[str, list[str]] = {}
    for word in WORDS.values():
        if word.meaning and any(word.on_one_line in title for title in titles):
            meanings.setdefault(word.meaning, []).append(word.on_one_line)
    return "; ".join(f"{', '.join(words)}: {meaning}" for meaning, words in meanings.items())


def _names(lines: Sequence[Line], short: bool) -> list[ShownColumn]:
    """Return the columns that distinguish the rows; the number of ranks is shown even where all have the same."""
    columns = [ShownColumn("strategy", sanitized_texts(column_values(lines, "strategy")), number=False)]
    if len(distinct_values(lines, "checkpointing")) > 1:
        kinds = sanitized_texts(column_values(lines, "checkpointing"))
        cells = [_SHORT_KINDS.get(kind, kind) if short else kind for kind in kinds]
        title = WORDS["checkpointing"].short if short else WORDS["checkpointing"].full
        columns.append(ShownColumn(title, cells, number=False))
    names = ["world_size", *(name for name in varying_columns(rows_of(lines)) if name != "world_size")]
    return columns + [
        ShownColumn(
            column_title(name, short),
            sanitized_texts(column_values(lines, name)),
            number=False,
            drop=_DROP_NAMES + len(names) - position,
            key=name,
        )
        for position, name in enumerate(names)
    ]


def speed_texts(lines: Sequence[Line]) -> list[str]:
    """Return every speed with the range over its runs, or with their number where there are too few to rank it."""
    medians = format_numbers(column_values(lines, "tokens_per_second"), ONE)
    return [text and text + _behind(text, line) for text, line in zip(medians, lines, strict=True)]


def _behind(median: str, line: Line) -> str:
    """Return what stands behind a median: a mark if it is to be ignored, else its range or the number of its runs."""
    if line.speed.is_disturbed:
        return f" {DISTURBED_MARK}"
    if not line.speed.is_ranked:
        return f" (n = {line.get('timed_runs') or 1})"
    decimals = len(median.partition(".")[2])  # as many as the median has
    return f" [{line.speed.low:,.{decimals}f}–{line.speed.high:,.{decimals}f}]"


def _status(line: Line) -> str:
    """Return the line's status, how many of its runs have it if not all do, and the marks of the notes below."""
    alike, runs = line.get("runs_alike"), line.get("runs")
    return (
        line.status
        + (f" {alike}/{runs}" if alike != runs else "")
        + (f" {STALE_MARK}" if line.get("stale_reason") else "")
        + (f" {DISTURBED_MARK}" if line.speed.is_disturbed else "")
    )


def sanitized_texts(cells: Sequence[object]) -> list[str]:
    """Return values as texts that a terminal can print, empty where unknown."""
    return ["" if cell is None else sanitize(cell_text(cell)) for cell in cells]
