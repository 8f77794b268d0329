"""The lines of a view as plain values to draw, the selection of lines to draw, and texts and tables of charts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from harness.records.schema import Record, Row
from harness.report.document import Table
from harness.report.frame import column_values
from harness.report.ranking import Standing
from harness.report.speeds import CROWDED, timed_runs
from harness.report.text import bytes_text
from harness.report.view import View
from harness.util.text import sanitize

MOST = 60  # bars or curves of one chart that are drawn at once; the page draws the first of those that are visible

ONE_OF_EACH = "one of every strategy, then the others in the order of the report"  # what `select` returns

Datum = dict[str, Any]  # the data of one mark; always has `strategy`


class Drawable(Protocol):
    """A line or series that a chart draws."""

    @property
    def strategy(self) -> str:
        """The strategy by which a page hides the item."""

    @property
    def position(self) -> int:
        """The position in the report."""

    @property
    def speed(self) -> float | None:
        """The tokens per second, None where unknown."""


D = TypeVar("D", bound=Drawable)


@dataclass(frozen=True)
class ChartLine:
    """All repeats of one configuration, as charts draw them."""

    label: str  # unique among the lines
    strategy: str
    position: int  # among the lines of the report
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
    def is_repeated(self) -> bool:
        """Whether the line represents several runs."""
        return len(self.record.runs) > 1

    @property
    def is_disturbed(self) -> bool:
        """Whether the line has times that are to be ignored."""
        return self.standing.speed is not None and self.standing.speed.is_disturbed

    @property
    def is_ranked(self) -> bool:
        """Whether the line has enough undisturbed repeats to compare its speed."""
        return self.standing.speed is not None and self.standing.speed.is_ranked

    @property
    def is_crowded(self) -> bool:
        """Whether the line has times of ranks that shared processor cores."""
        return self.standing.speed is not None and self.standing.speed.is_crowded

    @property
    def is_simulated(self) -> bool:
        """Whether the line has the times of a model of the device."""
        return self.standing.speed is not None and self.standing.speed.is_simulated

    @property
    def is_timed(self) -> bool:
        """Whether charts of time have the line: it is ok, nothing disturbed it, and every rank had a core."""
        return self.ok and not self.is_disturbed and not self.is_crowded

    @property
    def speed(self) -> float | None:
        """The median of the tokens per second, None where it is not known or not to be drawn."""
        known = self.standing.speed
        return finite_number(known.median) if known is not None and self.is_timed else None

    @property
    def peak(self) -> float | None:
        """The peak memory of a line that is ok, else None."""
        return self.number("peak_allocated_bytes") if self.ok else None

    def number(self, name: str) -> float | None:
        """Return a column's value if it can be drawn."""
        return finite_number(self.row.get(name))

    def datum(self, **values: Any) -> Datum:
        """Return the data of one of the line's marks."""
        return {"strategy": self.strategy, "label": self.label, "position": self.position} | values


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


def select(candidates: Sequence[D], most: int = MOST) -> list[D]:
    """Return at most so many of the candidates, in their order: the fastest of every strategy before the others."""
    fastest: dict[str, D] = {}
    for candidate in candidates:
        best = fastest.get(candidate.strategy)
        if candidate.speed is not None and (best is None or candidate.speed > (best.speed or 0.0)):
            fastest[candidate.strategy] = candidate
    first = sorted(fastest.values(), key=lambda candidate: -(candidate.speed or 0.0))
    positions = {candidate.position for candidate in first}
    others = [candidate for candidate in candidates if candidate.position not in positions]
    drawn = {candidate.position for candidate in [*first, *others][:most]}
    return [candidate for candidate in candidates if candidate.position in drawn]


def omitted_text(
    drawn: int, total: int, rule: str = "the first of those whose strategies are shown", noun: str = "configurations"
) -> str:
    """Return a sentence on what is not drawn, with a space before it; empty if everything is drawn."""
    return f" {drawn} of {total} {noun} are drawn at once: {rule}." if drawn < total else ""


def median_record(line: ChartLine) -> Record:
    """Return the record of the repeat with the median speed among those that the line's times are taken from.

    The parts of a step add up within one run only.
    """
    runs = timed_runs(line.record.runs) or [line.record]
    return sorted(runs, key=lambda run: finite_number(run.row.get("tokens_per_second")) or 0.0)[(len(runs) - 1) // 2]


def part_data(line: ChartLine, row: Row, names: Mapping[str, str], size: float) -> list[Datum]:
    """Return the data of a bar's parts, one for each column of `names` in their order, in units of `size`.

    A part that is 0 or unknown has none.
    """
    values = [(part, finite_number(row.get(name))) for name, part in names.items()]
    return [
        line.datum(part=part, value=value / size, exact=value, rank=rank)
        for rank, (part, value) in enumerate(values)
        if value
    ]


def end_text(line: ChartLine) -> str:
    """Return the status of a line that is not ok, with the memory that it last reported."""
    allocated = line.number("last_seen_allocated_bytes")
    return f"{line.status}" + (f", last reported {bytes_text(allocated)}" if allocated else "")


def untimed_text(lines: Sequence[ChartLine]) -> str:
    """Return the sentences on lines whose times are not drawn, with a space before each; empty if there are none."""
    disturbed = [line.label for line in lines if line.ok and line.is_disturbed]
    crowded = [line.label for line in lines if line.ok and line.is_crowded and not line.is_disturbed]
    text = f" Not drawn are the times of disturbed or barely timed runs: {_some(disturbed)}." if disturbed else ""
    return text + (f" Not drawn are the times of {CROWDED}: {_some(crowded)}." if crowded else "")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} configurations"


def failure_text(lines: Sequence[ChartLine]) -> str:
    """Return a sentence on the lines that are not ok, with a space before it; empty if there are none."""
    failed = [f"{line.label} ({line.status})" for line in lines if not line.ok]
    if len(failed) > _MOST_NAMES:
        return f" There are no figures for {len(failed)} configurations."
    return f" There are no figures for {', '.join(failed)}." if failed else ""


_MOST_NAMES = 6  # that a sentence lists


def value_table(strategies: Sequence[str], columns: Mapping[str, Sequence[str]], label_columns: int = 1) -> Table:
    """Return the table of a chart's exact values, without the number columns that are empty throughout.

    Args:
        strategies: That of each row.
        columns: The cells of each column by its title.
        label_columns: How many of the first columns are text.
    """
    titles = [title for place, title in enumerate(columns) if place < label_columns or any(columns[title])]
    rows = list(map(list, zip(*(columns[title] for title in titles), strict=True)))
    return Table(titles, rows, label_columns, strategies=strategies)


def padded_domain(values: Sequence[float], padding: float = 0.1) -> tuple[float, float]:
    """Return the ends of an axis that shows all values with some margin and does not start at 0."""
    low, high = min(values), max(values)
    margin = (high - low) * padding or abs(high) * padding or 1.0
    return low - margin, high + margin


def range_text(pairs: Sequence[tuple[str, float]], form: str = "") -> str:
    """Return the smallest and the largest value with their labels, or the one value that all have."""
    low, high = min(pairs, key=lambda pair: pair[1]), max(pairs, key=lambda pair: pair[1])
    texts = [format(value, form or (",.0f" if abs(value) >= 1000 else ".4g")) for _, value in (low, high)]
    if len(pairs) == 1:
        return f"{texts[0]} ({low[0]})"
    if texts[0] == texts[1]:
        return f"{texts[0]} for all"
    return f"from {texts[0]} ({low[0]}) to {texts[1]} ({high[0]})"
