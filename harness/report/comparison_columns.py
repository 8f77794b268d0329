"""The columns of the comparison, the same for the terminal and the page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from harness.report.frame import MEMORY_COLUMNS, baseline_names, column_values, distinct_values, varying_columns
from harness.report.labels import cell_text, column_title
from harness.report.text import (
    MILLISECONDS,
    ONE,
    Unit,
    byte_unit,
    format_deviations,
    format_fractions,
    format_numbers,
    format_percents,
    format_ratios,
)
from harness.util.text import sanitize

STALE_MARK, DISTURBED_MARK, UNSETTLED_MARK = "†", "‡", "~"

_SHORT_KINDS = {"selective": "sel", "attention": "attn"}  # of checkpointing

_DROP_NAMES = 100  # columns of names are left out after every number that may be


@dataclass(frozen=True)
class _Heading:
    """A word of a header, its abbreviation for the terminal, and the legend's explanation of the abbreviation."""

    full: str
    short: str
    meaning: str


_DEVIATION = "largest relative difference from the single-process reference"

TOKENS = _Heading("tokens/s", "tok/s", "tokens per second")

PEAK = _Heading("peak memory", "peak", "peak memory of the fullest rank")

SENT = _Heading("communication", "comm.", "bytes that one rank sends per step")

LOSS = _Heading("loss deviation", "loss dev.", _DEVIATION)

GRADIENT = _Heading("gradient deviation", "grad dev.", _DEVIATION)

_CHECKPOINTING = _Heading("checkpointing", "ckpt", "activation checkpointing (sel selective, attn attention)")

_STATE = _Heading("model state", "state", "parameters, gradients and optimizer state")

_ACTIVATIONS = _Heading("activations", "activ.", "activation memory")

_BUBBLE = _Heading("bubble", "bubble", "idle over working time of a pipeline, measured and in theory")

_MFU = _Heading("MFU", "MFU", "model FLOPs utilization")

HEADINGS = (_CHECKPOINTING, TOKENS, _MFU, _BUBBLE, PEAK, _STATE, _ACTIVATIONS, SENT, LOSS, GRADIENT)


@dataclass(frozen=True)
class Column:
    """A column ready to show, with a text for each row."""

    header: tuple[str, str]  # its two lines, which are name and unit as a rule
    cells: list[str]
    number: bool = True
    drop: int = 0  # the order in which columns are left out where width is short; a column with 0 is always shown
    key: str = ""  # the column of runs.csv, if it is one

    @property
    def title(self) -> str:
        """The header on one line."""
        return " ".join(part for part in self.header if part)


def comparison_columns(table: pd.DataFrame, short: bool) -> list[Column]:
    """Return the columns of the main table, without columns of numbers that are empty throughout.

    Args:
        table: The frame of the lines.
        short: Whether to abbreviate headers and kinds of checkpointing, for the terminal.
    """
    memory = byte_unit([v for name in (*MEMORY_COLUMNS, "state_bytes") for v in column_values(table, name)])
    communication = byte_unit(column_values(table, "communication_bytes"))
    compared = bool(baseline_names(table))

    def number(key: str, title: tuple[str, str], unit: Unit, drop: int) -> Column:
        return Column(title, format_numbers(column_values(table, key), unit), drop=drop, key=key)

    def header(heading: _Heading, unit: str = "") -> tuple[str, str]:
        return heading.short if short else heading.full, unit

    def ratio(key: str, heading: _Heading, drop: int) -> Column:
        return Column(
            ("×", header(heading)[0]),
            format_ratios(column_values(table, f"{key}_ratio")) if compared else [""] * len(table),
            drop=drop,
        )

    speed_ratio = ratio("tokens_per_second", TOKENS, 11)
    marks = [UNSETTLED_MARK if unsettled else "" for unsettled in column_values(table, "unsettled")]
    numbers = [
        number("tokens_per_second", ("", header(TOKENS)[0]), ONE, 0),
        Column(("±", "%"), format_percents(column_values(table, "between_runs")), drop=10),
        Column(("", "runs"), _runs(table), drop=7),
        number("tokens_per_second_per_device", header(TOKENS, "/device" if short else "per device"), ONE, 2),
        replace(speed_ratio, cells=[cell and cell + mark for cell, mark in zip(speed_ratio.cells, marks, strict=True)]),
        Column(header(_MFU, "%"), format_percents(column_values(table, "mfu")), drop=9, key="mfu"),
        number("step_seconds", ("step", "ms"), MILLISECONDS, 8),
        Column(("", header(_BUBBLE)[0]), format_fractions(column_values(table, "pipeline_bubble")), drop=15),
        Column(
            header(_BUBBLE, "theory" if short else "in theory"),
            format_fractions(column_values(table, "pipeline_bubble_theory")),
            drop=1,
        ),
        number("peak_allocated_bytes", header(PEAK, memory.name), memory, 0),
        ratio("peak_allocated_bytes", PEAK, 13),
        number("state_bytes", header(_STATE, memory.name), memory, 4),
        number("activation_bytes", header(_ACTIVATIONS, memory.name), memory, 3),
        number("communication_bytes", header(SENT, communication.name), communication, 12),
        ratio("communication_bytes", SENT, 14),
        Column(two_lines(header(LOSS)[0]), format_deviations(column_values(table, "loss_deviation")), drop=5),
        Column(two_lines(header(GRADIENT)[0]), format_deviations(column_values(table, "grad_deviation")), drop=6),
    ]
    return _names(table, short) + [column for column in numbers if any(column.cells)]


def abbreviations(columns: Sequence[Column]) -> str:
    """Return a legend of the abbreviations and terms in the headers of these columns; empty if there are none."""
    titles = [column.title for column in columns]
    meanings: dict[str, list[str]] = {}
    for heading in HEADINGS:
        if any(heading.short in title for title in titles):
            meanings.setdefault(heading.meaning, []).append(heading.short)
    return "; ".join(f"{', '.join(words)}: {meaning}" for meaning, words in meanings.items())


def two_lines(title: str) -> tuple[str, str]:
    """Return a title of two words as the two lines of a header."""
    first, second = title.split(" ", 1)
    return first, second


def _names(table: pd.DataFrame, short: bool) -> list[Column]:
    """Return the columns that distinguish the rows, and the status."""
    columns = [Column(("strategy", ""), sanitized_texts(column_values(table, "strategy")), number=False)]
    if len(distinct_values(table, "checkpointing")) > 1:
        kinds = [str(value or "") for value in column_values(table, "checkpointing")]
        cells = [sanitize(_SHORT_KINDS.get(kind, kind) if short else kind) for kind in kinds]
        title = _CHECKPOINTING.short if short else _CHECKPOINTING.full
        columns.append(Column((title, ""), cells, number=False))
    varying = [
        Column(
            (column_title(name, short), ""),
            sanitized_texts(column_values(table, name)),
            number=False,
            drop=_DROP_NAMES + position,
        )
        for position, name in enumerate(reversed(varying_columns(table)))
    ]
    return [*columns, *reversed(varying), Column(("status", ""), _statuses(table), number=False)]


def _statuses(table: pd.DataFrame) -> list[str]:
    """Return each line's status, how many of its runs have it if not all do, and the marks of the notes below."""
    parts = (column_values(table, name) for name in ("status", "runs", "runs_alike", "stale_reason", "noise_warning"))
    return [
        status
        + (f" {alike}/{runs}" if alike != runs else "")
        + (f" {STALE_MARK}" if stale else "")
        + (f" {DISTURBED_MARK}" if disturbed else "")
        for status, runs, alike, stale, disturbed in zip(*parts, strict=True)
    ]


def _runs(table: pd.DataFrame) -> list[str]:
    """Return how many runs each line represents, if any represents several."""
    runs = column_values(table, "runs")
    return [str(count) for count in runs] if any(count and count > 1 for count in runs) else [""] * len(runs)


def sanitized_texts(cells: Sequence[object]) -> list[str]:
    """Return values as texts that a terminal can print, empty where unknown."""
    return ["" if cell is None else sanitize(cell_text(cell)) for cell in cells]
