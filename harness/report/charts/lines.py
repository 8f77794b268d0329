"""The lines of a view as plain values to draw, the selection of lines to draw, and texts and tables of charts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from harness.records.schema import Record, Row
from harness.report.document import Table
from harness.report.frame import column_values
from harness.report.text import bytes_text
from harness.report.view import View
from harness.util.text import sanitize

MOST = 24  # lines of one chart

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
    """All repeats of one run, as charts draw them."""

    label: str  # unique among the lines
    strategy: str
    position: int  # among the lines of the report
    row: Row
    record: Record  # the merged record: its `runs` are the records it represents

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
    def speed(self) -> float | None:
        """The tokens per second of a line that is ok, else None."""
        return self.number("tokens_per_second") if self.ok else None

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
    for position, (label, record) in enumerate(zip(labels, view.lines, strict=True)):
        row = record.row
        name = sanitize(label)
        name = f"{name} ({row['run_id']})" if name in lines else name
        lines[name] = ChartLine(name, sanitize(row.get("strategy") or ""), position, row, record)
    return list(lines.values())


def select(candidates: Sequence[D]) -> list[D]:
    """Return at most MOST of the candidates, in their order: the fastest of every strategy before the others."""
    fastest: dict[str, D] = {}
    for candidate in candidates:
        best = fastest.get(candidate.strategy)
        if candidate.speed is not None and (best is None or candidate.speed > (best.speed or 0.0)):
            fastest[candidate.strategy] = candidate
    first = sorted(fastest.values(), key=lambda candidate: -(candidate.speed or 0.0))
    positions = {candidate.position for candidate in first}
    others = [candidate for candidate in candidates if candidate.position not in positions]
    drawn = {candidate.position for candidate in [*first, *others][:MOST]}
    return [candidate for candidate in candidates if candidate.position in drawn]


def omitted_text(drawn: int, total: int) -> str:
    """Return a sentence on what is not drawn, with a space before it; empty if everything is drawn."""
    rule = "the fastest of every strategy, then the others in the order of the report"
    return f" {drawn} of {total} configurations are drawn: {rule}." if drawn < total else ""


def median_record(line: ChartLine) -> Record:
    """Return the record of the repeat with the median speed among those that ended with the line's status.

    The parts of a step add up within one run only.
    """
    runs = _runs_with_same_status(line)
    return sorted(runs, key=lambda run: finite_number(run.row.get("tokens_per_second")) or 0.0)[(len(runs) - 1) // 2]


def peak_record(line: ChartLine) -> Record:
    """Return the record of the repeat with the largest peak."""
    return max(_runs_with_same_status(line), key=lambda run: finite_number(run.row.get("peak_allocated_bytes")) or 0.0)


def _runs_with_same_status(line: ChartLine) -> list[Record]:
    return [run for run in line.record.runs if run.status == line.status] or [line.record]


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


def failure_marks(lines: Sequence[ChartLine]) -> list[Datum]:
    """Return the data of the marks that replace the bars of lines that are not ok."""
    return [
        line.datum(zero=0, ended=_end_text(line), reason=sanitize(line.row.get("reason") or ""))
        for line in lines
        if not line.ok
    ]


def _end_text(line: ChartLine) -> str:
    allocated = line.number("last_seen_allocated_bytes")
    return f"{line.status}" + (f", last reported {bytes_text(allocated)}" if allocated else "")


def failure_text(lines: Sequence[ChartLine]) -> str:
    """Return a sentence on the lines that are not ok, with a space before it; empty if there are none."""
    failed = [f"{line.label} ({line.status})" for line in lines if not line.ok]
    return f" There are no figures for {', '.join(failed)}." if failed else ""


def value_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], strategies: Sequence[str], label_columns: int = 1
) -> Table:
    """Return the table of a chart's exact values, without the number columns that are empty throughout."""
    positions = [
        position for position in range(len(header)) if position < label_columns or any(row[position] for row in rows)
    ]
    cells = [[row[position] for position in positions] for row in rows]
    return Table([header[position] for position in positions], cells, label_columns, strategies=list(strategies))


def padded_domain(values: Sequence[float], padding: float = 0.1) -> tuple[float, float]:
    """Return the ends of an axis that shows all values with some margin and does not start at 0."""
    low, high = min(values), max(values)
    margin = (high - low) * padding or abs(high) * padding or 1.0
    return low - margin, high + margin


def range_text(pairs: Sequence[tuple[str, float]], form: str = "") -> str:
    """Return the smallest and the largest value with their labels, or the one value that all have."""
    low, high = min(pairs, key=lambda pair: pair[1]), max(pairs, key=lambda pair: pair[1])
    texts = [format(value, form or (",.0f" if abs(value) >= 1000 else ".4g")) for _, value in (low, high)]
    if texts[0] == texts[1]:
        return f"{texts[0]} for all"
    return f"from {texts[0]} ({low[0]}) to {texts[1]} ({high[0]})"
