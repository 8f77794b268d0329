"""What bars and points are drawn of: the lines of a view as plain values, and how many of them are drawn."""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from harness.records.schema import Record, Row
from harness.report import frame
from harness.report.document import Table
from harness.report.view import View
from harness.util.text import sanitize

MOST = 24  # lines of one chart

Datum = dict[str, Any]  # what one mark is drawn of; always has `strategy`


class Drawn(Protocol):
    """One of what a chart draws several of."""

    @property
    def strategy(self) -> str: ...
    @property
    def place(self) -> int: ...
    @property
    def speed(self) -> float | None: ...


D = TypeVar("D", bound=Drawn)


@dataclass(frozen=True)
class Line:
    """All repeats of one run."""

    label: str  # no two lines have the same
    strategy: str
    place: int  # among the lines of the report
    row: Row
    record: Record  # as merged: `runs` are the records it stands for

    @property
    def ok(self) -> bool:
        return bool(self.row["status"] == "ok")

    @property
    def repeated(self) -> bool:
        return len(self.record.get("runs") or []) > 1

    @property
    def speed(self) -> float | None:
        """Tokens a second of what ended ok."""
        return self.number("tokens_per_second") if self.ok else None

    def number(self, name: str) -> float | None:
        return number(self.row.get(name))

    def datum(self, **values: Any) -> Datum:
        return {"strategy": self.strategy, "label": self.label, "place": self.place} | values


def number(value: Any) -> float | None:
    """None for all that cannot be drawn: a record may hold 1e999, which is read as infinite."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None


def lines(view: View) -> list[Line]:
    found: dict[str, Line] = {}
    for place, (label, record) in enumerate(zip(frame.values(view.line_medians, "label"), view.lines, strict=True)):
        row = record["row"]
        name = sanitize(label)
        name = f"{name} ({row['run_id']})" if name in found else name
        found[name] = Line(name, sanitize(row.get("strategy") or ""), place, row, record)
    return list(found.values())


def select(found: Sequence[D]) -> list[D]:
    """At most MOST, in their order: the fastest of every strategy before the others."""
    fastest: dict[str, D] = {}
    for one in found:
        best = fastest.get(one.strategy)
        if one.speed is not None and (best is None or one.speed > (best.speed or 0.0)):
            fastest[one.strategy] = one
    first = sorted(fastest.values(), key=lambda one: -(one.speed or 0.0))
    taken = {one.place for one in first}
    places = {one.place for one in [*first, *(one for one in found if one.place not in taken)][:MOST]}
    return [one for one in found if one.place in places]


def omitted_text(drawn: int, of: int) -> str:
    """A sentence on what is not drawn, with the space before it."""
    rule = "the fastest that is ok of every strategy, then in the report's order"
    return f" Of {of} lines {drawn} are drawn: {rule}." if drawn < of else ""


def typical(line: Line) -> Record:
    """The record of one repeat: of those that ended as the line did, the one whose speed is in the middle.

    Parts of a step add up in one run alone.
    """
    runs = _alike(line)
    return sorted(runs, key=lambda run: number(run["row"].get("tokens_per_second")) or 0.0)[(len(runs) - 1) // 2]


def fullest(line: Line) -> Record:
    """The record of the repeat with the line's peak."""
    return max(_alike(line), key=lambda run: number(run["row"].get("peak_allocated_bytes")) or 0.0)


def _alike(line: Line) -> list[Record]:
    runs: list[Record] = line.record.get("runs") or []
    return [run for run in runs if run["row"]["status"] == line.row["status"]] or [line.record]


def parts(line: Line, row: Row, names: Mapping[str, str], size: float) -> list[Datum]:
    """What of a bar each column of `names` is, in their order and in units of `size`; none for what is 0 or unknown."""
    values = [(part, number(row.get(name))) for name, part in names.items()]
    return [
        line.datum(part=part, value=value / size, exact=value, rank=rank)
        for rank, (part, value) in enumerate(values)
        if value
    ]


def failure_marks(lines: Sequence[Line]) -> list[Datum]:
    """What stands in the place of the bars of lines that are not ok."""
    return [
        line.datum(zero=0, ended=_ended(line), reason=sanitize(line.row.get("reason") or ""))
        for line in lines
        if not line.ok
    ]


def _ended(line: Line) -> str:
    held = line.number("last_allocated_bytes")
    return f"{line.row['status']}" + (f", last seen at {frame.bytes_text(held)}" if held else "")


def failure_text(lines: Sequence[Line]) -> str:
    """A sentence on the lines that are not ok, with the space before it."""
    failed = [f"{line.label} ({line.row['status']})" for line in lines if not line.ok]
    return f" Without figures: {', '.join(failed)}." if failed else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], strategies: Sequence[str], names: int = 1) -> Table:
    """Without the columns that are empty throughout."""
    kept = [place for place in range(len(header)) if place < names or any(row[place] for row in rows)]
    cells = [[row[place] for place in kept] for row in rows]
    return Table([header[place] for place in kept], cells, names, strategies=list(strategies))


def counted(lines: Sized) -> str:
    return f"{len(lines)} line{'s'[: len(lines) != 1]}"


def padded_domain(values: Sequence[float], around: float = 0.1) -> tuple[float, float]:
    """An axis that shows all of the values with some room, and does not start at 0."""
    low, high = min(values), max(values)
    room = (high - low) * around or abs(high) * around or 1.0
    return low - room, high + room


def range_text(pairs: Sequence[tuple[str, float]], form: str = "") -> str:
    """From which value, and whose, to which; or that there is one value."""
    low, high = min(pairs, key=lambda pair: pair[1]), max(pairs, key=lambda pair: pair[1])
    texts = [format(value, form or (",.0f" if abs(value) >= 1000 else ".4g")) for _, value in (low, high)]
    if texts[0] == texts[1]:
        return f"{texts[0]} throughout"
    return f"from {texts[0]} ({low[0]}) to {texts[1]} ({high[0]})"
