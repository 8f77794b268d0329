"""The lines of a view as plain values to draw, and the selection of lines to draw."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from harness.records.schema import Record, Row
from harness.report.frame import column_values
from harness.report.ranking import Standing
from harness.report.speeds import CROWDED, Speed
from harness.report.text import bytes_text
from harness.report.view import View
from harness.util.text import sanitize

MOST = 60  # bars or curves of one chart that are drawn at once; the page draws the first of those that are visible

Datum = dict[str, Any]  # the data of one mark; always has `strategy`

_NO_SPEED = Speed(math.nan, math.nan, math.nan, 0, is_disturbed=False)


@dataclass(frozen=True)
class Item:
    """What a row of a chart stands for, such as a line of the report."""

    label: str
    strategy: str  # by which the page hides the item
    position: int  # from the top

    @property
    def speed(self) -> float | None:
        """The tokens per second, None where it is not known or not to be drawn."""
        return None

    def datum(self, **values: Any) -> Datum:
        """Return the data of one of the item's marks."""
        return {"strategy": self.strategy, "label": self.label, "position": self.position} | values


AnyItem = TypeVar("AnyItem", bound=Item)


@dataclass(frozen=True)
class ChartLine(Item):
    """All repeats of one configuration, as charts draw them. Its label is unique among the lines of the report."""

    row: Row
    record: Record  # the merged record: its `runs` are the records it represents
    standing: Standing  # its place among comparable lines

    @property
    def status(self) -> str:
        """The status of the line's runs."""
        return self.record.status

    @property
    def ok(self) -> bool:
        """Whether the line has figures."""
        return self.status == "ok"

    @property
    def timing(self) -> Speed:
        """The speed over the repeats, one of no runs where none is known."""
        return self.standing.speed or _NO_SPEED

    @property
    def untimed(self) -> str:
        """Why the times of a line that is ok are not drawn; empty where they are."""
        reasons = ("disturbed" * self.timing.is_disturbed, CROWDED * self.timing.is_crowded)
        return next(filter(None, reasons), "") if self.ok else ""

    @property
    def is_timed(self) -> bool:
        """Whether charts of time have the line: it is ok, nothing disturbed it, and every rank had a core."""
        return self.ok and not self.untimed

    @property
    def state(self) -> str:
        """The status, or why the times are not drawn."""
        return f"{self.untimed}: not comparable" if self.untimed else self.status

    @property
    def speed(self) -> float | None:
        """The median of the tokens per second, None where it is not known or not to be drawn."""
        return finite_number(self.timing.median) if self.is_timed else None

    @property
    def peak(self) -> float | None:
        """The peak memory of a line that is ok, else None."""
        return self.number("peak_allocated_bytes") if self.ok else None

    @property
    def end(self) -> str:
        """The status of a line that is not ok, with the memory that it last reported."""
        allocated = self.number("last_seen_allocated_bytes")
        return self.status + (f", last reported {bytes_text(allocated)}" if allocated else "")

    def number(self, name: str) -> float | None:
        """Return a column's value if it can be drawn."""
        return finite_number(self.row.get(name))


def finite_number(value: Any) -> float | None:
    """Return a finite number, None for anything else: a record may hold 1e999, which is read as infinity."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def chart_lines(view: View) -> list[ChartLine]:
    """Return the lines of a view under unique names."""
    lines: dict[str, ChartLine] = {}
    labels = column_values(view.line_medians, "label")
    known = zip(labels, view.lines, view.ranking.standings, strict=True)
    for position, (label, record, standing) in enumerate(known):
        row = record.row
        name = sanitize(label)
        name = f"{name} ({row['run_id']})" if name in lines else name
        lines[name] = ChartLine(name, sanitize(row.get("strategy") or ""), position, row, record, standing)
    return list(lines.values())


def ordered(lines: Sequence[ChartLine], key: Callable[[ChartLine], float | None]) -> list[ChartLine]:
    """Return the lines in ascending order, numbered from 0: those without a key come late, those that failed last."""

    def rank(line: ChartLine) -> tuple[bool, bool, float]:
        value = key(line)
        return not line.ok, value is None, value or 0.0

    return [replace(line, position=position) for position, line in enumerate(sorted(lines, key=rank))]


def select(candidates: Sequence[AnyItem], most: int = MOST) -> list[AnyItem]:
    """Return at most so many of the candidates, in their order: the fastest of every strategy before the others."""
    by_speed = sorted((item for item in candidates if item.speed is not None), key=lambda item: -(item.speed or 0.0))
    fastest = {item.strategy: item for item in reversed(by_speed)}
    first = [item for item in by_speed if fastest[item.strategy] is item]
    others = [item for item in candidates if fastest.get(item.strategy) is not item]
    drawn = {item.position for item in [*first, *others][:most]}
    return [item for item in candidates if item.position in drawn]
