"""The columns of the comparison, the same for the terminal and the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from harness.report.document import Disturbed
from harness.report.frame import MEMORY_COLUMNS, baseline_name, column_values, distinct_values, varying_columns
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
class Term:
    """A word of a header, its abbreviation for the terminal, and the legend's explanation of the abbreviation."""

    full: str
    short: str
    meaning: str


_DEVIATION = "largest relative difference from the reference"

TOKENS = Term("tokens/s", "tok/s", "tokens per second")

PEAK = Term("peak memory", "peak", "peak memory of the fullest rank")

SENT = Term("communication", "comm.", "bytes that one rank sends per step")

LOSS = Term("loss deviation", "loss dev.", _DEVIATION)

GRADIENT = Term("gradient deviation", "grad dev.", _DEVIATION)

_CHECKPOINTING = Term("checkpointing", "ckpt", "activation checkpointing (sel selective, attn attention)")

_STATE = Term("model state", "state", "parameters, gradients and optimizer state")

_ACTIVATIONS = Term("activations", "activ.", "activation memory")

_BUBBLE = Term("bubble", "bubble", "idle over working time of a pipeline, measured and in theory")

_MFU = Term("MFU", "MFU", "model FLOPs utilization")

HEADINGS = (_CHECKPOINTING, TOKENS, _MFU, _BUBBLE, PEAK, _STATE, _ACTIVATIONS, SENT, LOSS, GRADIENT)


@dataclass(frozen=True)
class ShownColumn:
    """A column ready to show, with a text for each row; a cell may be a Disturbed."""

    header: tuple[str, str]  # its two lines, which are name and unit as a rule
    cells: list[str]
    number: bool = True
    drop: int = 0  # the order in which columns are left out where width is short; a column with 0 is always shown
    key: str = ""  # the column of runs.csv, if it is one
    is_extra: bool = False  # whether it is shown on demand only

    @property
    def title(self) -> str:
        """The header on one line."""
        return " ".join(part for part in self.header if part)


def comparison_columns(table: pd.DataFrame, short: bool) -> list[ShownColumn]:
    """Return the columns of the main table, without columns of numbers that are empty throughout.

    Eight come first, with those that vary beside them: strategy, ranks, speed, its ratio, peak memory, its ratio,
    communication and status. The others are extra.

    Args:
        table: The frame of the lines.
        short: Whether to abbreviate headers and kinds of checkpointing, for the terminal.
    """
    memory = byte_unit([v for name in (*MEMORY_COLUMNS, "state_bytes") for v in column_values(table, name)])
    communication = byte_unit(column_values(table, "communication_bytes"))
    compared = bool(baseline_name(table))

    def number(key: str, title: tuple[str, str], unit: Unit, drop: int = 0) -> ShownColumn:
        return ShownColumn(title, format_numbers(column_values(table, key), unit), drop=drop, key=key)

    def timed(key: str, title: tuple[str, str], cells: list[str], drop: int = 0) -> ShownColumn:
        return ShownColumn(title, disturbed_cells(table, cells), drop=drop, key=key)

    def header(heading: Term, unit: str = "") -> tuple[str, str]:
        return heading.short if short else heading.full, unit

    def ratio(key: str, heading: Term, drop: int) -> ShownColumn:
        cells = format_ratios(column_values(table, f"{key}_ratio")) if compared else [""] * len(table)
        return ShownColumn(("×", header(heading)[0]), cells, drop=drop)

    def texts(name: str, form: Callable[[Sequence[float | None]], list[str]]) -> list[str]:
        return form(column_values(table, name))

    def numbers(name: str, unit: Unit) -> list[str]:
        return format_numbers(column_values(table, name), unit)

    speed_ratio = ratio("tokens_per_second", TOKENS, 11)
    marks = [UNSETTLED_MARK if unsettled else "" for unsettled in column_values(table, "unsettled")]
    main = [
        timed("tokens_per_second", ("", header(TOKENS)[0]), speed_texts(table)),
        replace(speed_ratio, cells=[cell and cell + mark for cell, mark in zip(speed_ratio.cells, marks, strict=True)]),
        number("peak_allocated_bytes", header(PEAK, memory.name), memory),
        ratio("peak_allocated_bytes", PEAK, 13),
        number("communication_bytes", header(SENT, communication.name), communication, 12),
        ShownColumn(("status", ""), _statuses(table), number=False),
    ]
    rate = header(TOKENS, "/device" if short else "per device")
    counts = column_values(table, "grad_accumulation")
    micro_batches = ["" if count is None or len({*counts} - {None}) < 2 else f"{count:.0f}" for count in counts]
    extra = [
        ShownColumn(("micro-batches", "per step"), micro_batches, key="grad_accumulation"),
        ShownColumn(
            ("timed", "runs"), [str(runs or "") for runs in column_values(table, "timed_runs")], key="timed_runs"
        ),
        timed("tokens_per_second_per_device", rate, numbers("tokens_per_second_per_device", ONE)),
        timed("mfu", header(_MFU, "%"), texts("mfu", format_percents)),
        timed("step_seconds", ("step", "ms"), numbers("step_seconds", MILLISECONDS)),
        timed("estimated_step_seconds", ("estimated", "step ms"), numbers("estimated_step_seconds", MILLISECONDS)),
        timed("pipeline_bubble", ("", header(_BUBBLE)[0]), texts("pipeline_bubble", format_fractions)),
        ShownColumn(
            header(_BUBBLE, "theory" if short else "in theory"),
            texts("pipeline_bubble_theory", format_fractions),
            key="pipeline_bubble_theory",
        ),
        number("state_bytes", header(_STATE, memory.name), memory),
        number("activation_bytes", header(_ACTIVATIONS, memory.name), memory),
        ratio("communication_bytes", SENT, 0),
        ShownColumn(two_lines(header(LOSS)[0]), texts("loss_deviation", format_deviations), key="loss_deviation"),
        ShownColumn(two_lines(header(GRADIENT)[0]), texts("grad_deviation", format_deviations), key="grad_deviation"),
    ]
    columns = [*main, *(replace(column, is_extra=True) for column in extra)]
    return _names(table, short) + [column for column in columns if any(column.cells)]


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


def disturbed_cells(table: pd.DataFrame, cells: Sequence[str]) -> list[str]:
    """Return the cells of a speed or time, with those that are to be ignored as Disturbed."""
    ignored = column_values(table, "is_ignored")
    return [Disturbed(cell) if cell and is_ignored else cell for cell, is_ignored in zip(cells, ignored, strict=True)]


def abbreviations(columns: Sequence[ShownColumn]) -> str:
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


def _names(table: pd.DataFrame, short: bool) -> list[ShownColumn]:
    """Return the columns that distinguish the rows; the number of ranks is shown even where all have the same."""
    columns = [ShownColumn(("strategy", ""), sanitized_texts(column_values(table, "strategy")), number=False)]
    if len(distinct_values(table, "checkpointing")) > 1:
        kinds = [str(value or "") for value in column_values(table, "checkpointing")]
        cells = [sanitize(_SHORT_KINDS.get(kind, kind) if short else kind) for kind in kinds]
        title = _CHECKPOINTING.short if short else _CHECKPOINTING.full
        columns.append(ShownColumn((title, ""), cells, number=False))
    names = ["world_size", *(name for name in varying_columns(table) if name != "world_size")]
    return columns + [
        ShownColumn(
            (column_title(name, short), ""),
            sanitized_texts(column_values(table, name)),
            number=False,
            drop=_DROP_NAMES + len(names) - position,
            key=name,
        )
        for position, name in enumerate(names)
    ]


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
