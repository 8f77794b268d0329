"""The picture of a report's first screen: peak memory and speed, or bytes sent, of each configuration in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.report.charts import bar_marks, marks, style
from harness.report.charts.lines import (
    ChartLine,
    chart_lines,
    end_text,
    failure_text,
    omitted_text,
    range_text,
    untimed_text,
    value_table,
)
from harness.report.charts.speed import TOKENS, how_drawn, speed_layers
from harness.report.charts.style import alt
from harness.report.document import Chart, Table
from harness.report.speeds import CROWDED
from harness.report.text import ONE, Unit, byte_unit, format_numbers, pluralize
from harness.report.view import View

_MOST = 16  # configurations that fit on the first screen

_STEP, _SPLIT_STEP, _TICKS = 22, 30, 3  # pixels of each row, also where labels have two lines; ticks of each axis

_PEAK, _SENT = "peak_allocated_bytes", "communication_bytes"

_LETTER, _GAP, _VALUE = 6.4, 16, 56  # pixels: of a character, between the panels, and of a value behind a bar


def first_picture(view: View) -> Chart | None:
    """Draw peak memory and tokens per second side by side, or bytes sent where charts have no speeds.

    The largest group of comparable configurations comes first: sorted by speed if that may be compared, else by memory.
    """
    lines = _sorted(view)
    if not any(line.peak for line in lines) and not any(line.speed for line in lines):
        return None
    most = _drawn_count(lines)
    drawn = lines[:most]
    unit = byte_unit([line.peak for line in lines])
    alt_text = _description(view, lines, drawn, unit)
    labels = round(_LETTER * max(len(text) for line in drawn for text in bar_marks.label_lines(line.label))) + 8
    is_split = any(len(bar_marks.label_lines(line.label)) > 1 for line in drawn)
    has_speeds = view.draws_speeds and any(line.speed for line in drawn)
    has_bytes = not view.draws_speeds and any(line.number(_SENT) for line in drawn)
    count = 2 if has_speeds or has_bytes else 1
    beside = labels + (count - 1) * _GAP + count * _VALUE
    width = (style.WIDTH - beside) // count
    by_speed = _is_ranked(view)
    note = "median, range" if by_speed else "not ranked"
    panels = [_size_layers(view, lines, f"peak memory ({unit.name})", _PEAK, unit)]
    if has_bytes:
        sent = byte_unit([line.number(_SENT) for line in lines])
        panels.append(_size_layers(view, lines, f"bytes sent ({sent.name})", _SENT, sent, labels=False))
    if has_speeds:
        title = f"tokens/s ({note})"
        words = _words([line for line in lines if not line.speed], title, _without_speed, labels=False)
        panels.append([*speed_layers(view, lines, title, labels=False, ticks=_TICKS), *words])
    height = alt.Step(_SPLIT_STEP if is_split else _STEP)
    cells = [alt.layer(*layers).properties(width=width, height=height) for layers in panels]
    chart = alt.concat(*cells, columns=count).properties(spacing=_GAP)
    chart = marks.panels(chart, count, beside, (1, labels + _VALUE))
    name = "Memory and speed" if has_speeds else "Memory and communication" if has_bytes else "Peak memory"
    vega_lite = marks.finish(view, name, chart, alt_text, _VALUE - 8, most, is_narrow=True)
    vega_lite = bar_marks.with_order(vega_lite, [line.strategy for line in lines], most)
    return Chart("first", name, alt_text, vega_lite, _table(view, lines, unit), 2)


def _drawn_count(lines: Sequence[ChartLine]) -> int:
    """Return how many of the sorted lines are drawn: all if they fit, else those of the first comparable group."""
    if len(lines) <= _MOST:
        return len(lines)
    return min(_MOST, sum(line.standing.group == 0 for line in lines) or _MOST)


def _is_ranked(view: View) -> bool:
    return bool(view.ranking.groups) and bool(view.ranking.groups[0].ranked)


def _sorted(view: View) -> list[ChartLine]:
    """Return all lines: those of the largest group before others, the fastest or the smallest first."""
    lines = chart_lines(view)
    by_speed = _is_ranked(view)

    def key(line: ChartLine) -> tuple[bool, bool, float]:
        value = line.peak
        if by_speed:
            value = -line.speed if line.speed and line.is_ranked else None
        return line.standing.group != 0, value is None, value or 0.0

    places = {line.position: float(place) for place, line in enumerate(sorted(lines, key=key))}
    return _named(bar_marks.ordered(lines, lambda line: places[line.position]))


def _named(lines: Sequence[ChartLine]) -> list[ChartLine]:
    """Return the lines under names that say the ranks of those that are not in the first group, and of no others."""
    varies = len({line.row.get("world_size") for line in lines}) > 1
    names = []
    for line in lines:
        ranks = line.row.get("world_size")
        suffix = f" on {pluralize(ranks, 'rank')}" if ranks and varies else ""
        bare = line.label.removesuffix(suffix)
        names.append(bare if line.standing.group in (0, None) else f"{bare}{suffix}")
    if len(set(names)) < len(names):
        return list(lines)
    return [replace(line, label=name) for line, name in zip(lines, names, strict=True)]


def _description(view: View, lines: Sequence[ChartLine], drawn: Sequence[ChartLine], unit: Unit) -> str:
    """Return what the picture shows, and what it does not."""
    peaks = [(line.label, line.peak / unit.size) for line in drawn if line.peak]
    speeds = [(line.label, line.speed) for line in drawn if line.speed] if view.draws_speeds else []
    sent = [(line.label, size) for line in drawn if line.ok and (size := line.number(_SENT)) is not None]
    unit_sent = byte_unit([size for _, size in sent])
    has_bytes = not view.draws_speeds and any(size for _, size in sent)
    second = f" and {TOKENS}" if view.draws_speeds else " and bytes sent per rank and step" if has_bytes else ""
    of = "" if len(speeds) == len(drawn) else f" of {'one' if len(speeds) == 1 else len(speeds)} of them"
    return (
        f"Peak memory{second} of {pluralize(len(drawn), 'configuration')}, the"
        f" {'fastest' if _is_ranked(view) else 'smallest'} first."
        + (f" Peaks in {unit.name}: {range_text(peaks)}." if peaks else "")
        + (f" {TOKENS.capitalize()}{of}: {range_text(speeds)}." if speeds else "")
        + (
            f" Bytes sent in {unit_sent.name}: {range_text([(label, size / unit_sent.size) for label, size in sent])}."
            if has_bytes
            else ""
        )
        + (how_drawn([line for line in drawn if line.speed]) + untimed_text(drawn) if view.draws_speeds else "")
        + failure_text(drawn)
        + omitted_text(len(drawn), len(lines), "those of the largest comparable group first; Comparison has all")
    )


def _size_layers(
    view: View, lines: Sequence[ChartLine], title: str, name: str, unit: Unit, labels: bool = True
) -> list[alt.Chart]:
    """Return the layers of a column of bytes: a bar for each line, or beside the labels why it has none."""
    known = [line for line in lines if line.ok and line.number(name) is not None]
    sizes = [line.number(name) or 0.0 for line in known]
    values = [
        line.datum(value=size / unit.size, total=size / unit.size, shown=text)
        for line, size, text in zip(known, sizes, format_numbers(sizes, unit), strict=True)
    ]
    tooltip = marks.tooltips(("value:Q", title, ",.4~f"))
    bar, axis = bar_marks.bar_layer(values).mark_bar(), bar_marks.label_axis(labels)
    value = bar_marks.from_zero("value", title, _TICKS)
    layers = [bar.encode(x=value, y=axis, color=marks.strategy_color(view), tooltip=tooltip)]
    layers = [*layers, bar_marks.numbers(values, title, labels)] if values else []
    without = [line for line in lines if line not in known]
    return layers + _words(without, title, end_text if labels else lambda _: "", labels)


def _words(lines: Sequence[ChartLine], title: str, text: Callable[[ChartLine], str], labels: bool) -> list[alt.Chart]:
    """Return the texts in the rows of lines without a figure; every panel has all rows, so that they are level."""
    values = [line.datum(zero=0, ended=text(line)) for line in lines]
    if not values:
        return []
    words = bar_marks.bar_layer(values).mark_text(align="left", dx=5, style="ended")
    return [words.encode(x=bar_marks.from_zero("zero", title), y=bar_marks.label_axis(labels), text="ended:N")]


def _without_speed(line: ChartLine) -> str:
    return "disturbed" if line.is_disturbed else CROWDED if line.is_crowded else ""


def _table(view: View, lines: Sequence[ChartLine], unit: Unit) -> Table:
    states = [(view.draws_speeds and line.ok and _without_speed(line)) or line.status for line in lines]
    columns = {
        "run": [line.label for line in lines],
        "status": states,
        f"peak memory ({unit.name})": format_numbers([line.peak for line in lines], unit),
    }
    if view.draws_speeds:
        columns[TOKENS] = format_numbers([line.speed for line in lines], ONE)
        columns["runs"] = [
            str(line.standing.speed.runs) if line.standing.speed and line.speed else "" for line in lines
        ]
    else:
        sizes = [line.number(_SENT) if line.ok else None for line in lines]
        sent = byte_unit(sizes)
        columns[f"bytes sent ({sent.name})"] = format_numbers(sizes, sent)
    return value_table([line.strategy for line in lines], columns, 2)
