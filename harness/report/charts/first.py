"""The picture of a report's first screen: peak memory and speed, or bytes sent, of each configuration in a row."""

from collections.abc import Sequence
from dataclasses import replace

from harness.report.charts import marks, style
from harness.report.charts.bars import LINES, Bars, Labels, bars
from harness.report.charts.marks import Field, Rows, Scale, bytes_field, column, unseen
from harness.report.charts.setting import setting_lines
from harness.report.charts.speed import speed_fields, speed_marks
from harness.report.document import Chart
from harness.report.lines import Line
from harness.report.sentences import sentence
from harness.report.text import pluralize
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
    most = _drawn_count(lines)
    fields, drawn = _fields(view, lines), Rows(lines[:most], _fields(view, lines[:most]))
    measure = "median" if view.draws_speeds else "sent"
    left = bars(view, lines, fields, Scale(fields["peak"].title))
    panels = [[left.mark("bar", "peak", "bar"), *left.texts("peak", "figure")]]
    name, title = "Memory and speed", f"tokens/s ({'median, range' if by_speed else 'not ranked'})"
    if not view.draws_speeds:
        name, title = "Memory and communication", fields["sent"].title
    right = Bars(view, left.rows, Scale(title), Labels("", text=f"columns > 1 ? '' : {LINES}"))
    if any(drawn.fields[measure].values):
        own = speed_marks(right) if view.draws_speeds else [right.mark("bar", "sent", "bar")]
        panels.append([*own, *right.texts(ended="untimed")])
    else:
        name = "Peak memory"
    names = (line for label in left.rows.fields["bar"].values[:most] for line in label.split("\n"))
    labels, count = round(_LETTER * max(map(len, names))) + 8, len(panels)
    width = (style.WIDTH - labels - (count - 1) * _GAP - count * _VALUE) // count
    cells = [{"layer": layers, "width": width, "height": left.height} for layers in panels]
    meta = {"beside": labels + _VALUE, **left.order(most)}
    plot = {"concat": cells, "columns": count, "spacing": _GAP, "usermeta": meta}
    facts = {"title": name, "by_speed": by_speed, "drawn": drawn, "measure": measure, "panels": count}
    omitted, setting = sentence("chart_omitted", drawn=most, total=len(lines), rule=_RULE), setting_lines(view)
    chart = marks.draw("first", name, setting, left.rows, "peak", plot, facts, None, _VALUE - 8, most, omitted)
    chart.spec["params"].append({"name": "columns", "value": count})
    return chart


def _fields(view: View, lines: Sequence[Line]) -> dict[str, Field]:
    """Return the peaks, and the speeds or the bytes sent."""
    peak = bytes_field("peak memory", [line.peak for line in lines])
    sent = bytes_field("bytes sent", [line.number("communication_bytes") if line.ok else None for line in lines])
    second = {"sent": sent, "total": unseen(sent.values), "shown": unseen(sent.cells)}
    if view.draws_speeds:
        speeds = speed_fields(lines)
        second = speeds | {name: replace(speeds[name], cells=()) for name in ("low", "high")}
    known = zip(lines, second["total"].values, strict=True)
    return {
        "status": column("status", [(view.draws_speeds and line.untimed) or line.status for line in lines], True),
        "peak": peak,
        "figure": unseen(peak.cells),
        "ended": unseen([line.end if line.peak is None else None for line in lines]),
        "untimed": unseen([line.untimed if value is None else None for line, value in known]),
        **second,
    }


def _drawn_count(lines: Sequence[Line]) -> int:
    """Return how many of the sorted lines are drawn: all if they fit, else those of the first comparable group."""
    if len(lines) <= _MOST:
        return len(lines)
    return min(_MOST, sum(line.group == 0 for line in lines) or _MOST)


def _sorted(view: View, by_speed: bool) -> list[Line]:
    """Return all lines: those of the largest group before others, the fastest or the smallest first.

    They are under names that say the ranks of those that are not in the first group, and of no others.
    """

    def key(line: Line) -> tuple[bool, bool, bool, float]:
        value = line.peak
        if by_speed:
            value = -line.drawn_speed if line.drawn_speed and line.speed.is_ranked else None
        return not line.ok, line.group != 0, value is None, value or 0.0

    lines = [replace(line, position=place) for place, line in enumerate(sorted(view.lines, key=key))]
    varies = len({line.row.get("world_size") for line in lines}) > 1
    names = []
    for line in lines:
        ranks = line.row.get("world_size")
        suffix = f" on {pluralize(ranks, 'rank')}" if ranks and varies else ""
        bare = line.label.removesuffix(suffix)
        names.append(bare if line.group in (0, None) else f"{bare}{suffix}")
    if len(set(names)) < len(names):
        return lines
    return [replace(line, label=name) for line, name in zip(lines, names, strict=True)]
