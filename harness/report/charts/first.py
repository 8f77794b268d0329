"""The picture of a report's first screen: peak memory and speed, or bytes sent, of each configuration in a row."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from harness.report.charts import style
from harness.report.charts.bars import LINES, Bars, bars, labels, ordered
from harness.report.charts.marks import Field, Rows, axis, bytes_field, column, draw, unseen
from harness.report.charts.speed import speed_fields, speed_marks
from harness.report.document import Chart
from harness.report.labels import value_text
from harness.report.lines import Line
from harness.report.view import View

_MOST = 16  # configurations that fit on the first screen

_RULE = "those of the largest comparable group first; Comparison has all"

_LETTER, _GAP, _VALUE = 6.4, 16, 56  # pixels: of a character, between the panels, and of a value behind a bar


def first_picture(view: View) -> Chart | None:
    """Draw peak memory and tokens per second side by side, or bytes sent where charts have no speeds.

    The largest group of comparable configurations comes first: sorted by speed if that may be compared, else by memory.
    """
    by_speed = bool(view.groups) and bool(view.groups[0].ranked)
    lines = _sorted(view, by_speed)
    if not any(line.peak or line.drawn_speed for line in lines):
        return None
    most = len(lines) if len(lines) <= _MOST else min(_MOST, sum(line.group == 0 for line in lines) or _MOST)
    fields, drawn = _fields(view, lines), Rows(lines[:most], _fields(view, lines[:most]))
    name, measure, title = "Memory and speed", "median", f"tokens/s ({'median, range' if by_speed else 'not ranked'})"
    if not view.draws_speeds:
        name, measure, title = "Memory and communication", "sent", fields["sent"].title
    left = bars(view, lines, fields, axis(fields["peak"].title))
    right = Bars(view, left.rows, axis(title), labels(f"columns > 1 ? '' : {LINES}"))
    own = speed_marks(right) if view.draws_speeds else [right.mark("bar", "sent", "bar")]
    panels = [
        [left.mark("bar", "peak", "bar"), *left.texts("peak", "figure")],
        [*own, *right.texts(ended="untimed")],
    ]
    if not any(drawn.fields[measure].values):
        name, panels = "Peak memory", panels[:1]
    count = len(panels)
    longest = max(len(line) for label in left.rows.fields["bar"].values[:most] for line in label.split("\n"))
    beside = round(_LETTER * longest) + 8
    width = (style.WIDTH - beside - (count - 1) * _GAP - count * _VALUE) // count
    cells = [{"layer": layers, "width": width, "height": left.height} for layers in panels]
    plot = {"concat": cells, "columns": count, "spacing": _GAP, "usermeta": {"beside": beside + _VALUE}}
    return draw(
        view,
        "first",
        name,
        left.rows,
        "peak",
        plot,
        facts={"title": name, "by_speed": by_speed, "drawn": drawn, "measure": measure, "panels": count},
        right=_VALUE - 8,
        rule=_RULE,
        most=most,
        params={"columns": count},
    )


def _fields(view: View, lines: Sequence[Line]) -> dict[str, Field]:
    """Return the peaks, and the speeds or the bytes sent."""
    peak = bytes_field("peak memory", [line.peak for line in lines])
    sent = bytes_field("bytes sent", [line.number("communication_bytes") if line.ok else None for line in lines])
    second = {"sent": sent, "total": unseen(sent.values), "shown": unseen(sent.cells)}
    if view.draws_speeds:
        speeds = speed_fields(lines)
        second = speeds | {name: replace(speeds[name], cells=()) for name in ("low", "high")}
    return {
        "status": column("status", [(view.draws_speeds and line.untimed) or line.status for line in lines], True),
        "peak": peak,
        "figure": unseen(peak.cells),
        "ended": unseen([line.end if line.peak is None else None for line in lines]),
        "untimed": unseen(
            [line.untimed if value is None else None for line, value in zip(lines, second["total"].values, strict=True)]
        ),
        **second,
    }


def _sorted(view: View, by_speed: bool) -> list[Line]:
    """Return all lines: those of the largest group before others, the fastest or the smallest first.

    They are under names that say the ranks of those that are not in the first group, and of no others.
    """
    by_figure = ordered(view.lines, _negative_speed if by_speed else attrgetter("peak"))
    lines = sorted(by_figure, key=lambda line: line.group != 0)
    varies = len({line.row.get("world_size") for line in lines}) > 1
    names = [_name(line, varies) for line in lines]
    is_unique = len(set(names)) == len(names)
    return [
        replace(line, position=place, label=name if is_unique else line.label)
        for place, (line, name) in enumerate(zip(lines, names, strict=True))
    ]


def _negative_speed(line: Line) -> float | None:
    return -line.drawn_speed if line.drawn_speed and line.speed.is_ranked else None


def _name(line: Line, varies: bool) -> str:
    """Return a line's label with its ranks, if these vary and it is not in the first group, or without."""
    ranks = line.row.get("world_size")
    suffix = f" {value_text('world_size', ranks)}" if ranks and varies else ""
    return line.label.removesuffix(suffix) + ("" if line.group in (0, None) else suffix)
