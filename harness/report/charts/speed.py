"""Charts of speed: tokens per second by configuration and over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.charts import bar_marks, marks
from harness.report.charts.curves import Scale, curves
from harness.report.charts.lines import (
    ChartLine,
    Datum,
    chart_lines,
    failure_text,
    range_text,
    select,
    untimed_text,
    value_table,
)
from harness.report.charts.series import Series, by_world
from harness.report.charts.style import alt
from harness.report.document import Chart, Table
from harness.report.speeds import MINIMUM_RUNS
from harness.report.text import ONE, format_numbers, format_percents, join_words, pluralize
from harness.report.view import View

_WIDE = 8  # if the most ranks over the fewest exceed this, both axes are logarithmic

TOKENS = "tokens per second"


def throughput(view: View) -> Chart | None:
    """Draw tokens per second of every line, the fastest first.

    Speeds of enough repeats are bars with the range of their runs. Others are hollow points, which rank nothing, and
    disturbed ones and those of ranks that shared cores are not drawn. Without ranked speeds there is no chart.
    """
    lines = bar_marks.ordered(chart_lines(view), lambda line: -line.speed if line.speed else None)
    if not view.draws_speeds or not any(line.speed for line in lines):
        return None
    known = [line for line in lines if line.speed]
    text = (
        f"{TOKENS.capitalize()} of {pluralize(len(known), 'configuration')},"
        f" {range_text([(line.label, line.speed or 0.0) for line in known])}.{how_drawn(known)}"
        f"{untimed_text(lines)}{failure_text(lines)}"
    )
    layers = [*speed_layers(view, lines, TOKENS), *bar_marks.notes(lines, TOKENS, is_timed=True)]
    strategies = [line.strategy for line in lines]
    return bar_marks.bar_chart(
        view, "throughput", "Tokens per second", text, strategies, layers, _speed_columns(lines), TOKENS, 2
    )


def how_drawn(lines: Sequence[ChartLine]) -> str:
    """Return a sentence on what bars and points of speeds are, with a space before it."""
    ranked = any(line.is_ranked for line in lines)
    single = any(not line.is_ranked for line in lines)
    text = " Bars are medians, with the range of the undisturbed repeats." if ranked else ""
    return text + (f" Hollow points are of fewer than {MINIMUM_RUNS} repeats and rank nothing." if single else "")


def speed_layers(
    view: View, lines: Sequence[ChartLine], title: str, labels: bool = True, ticks: int | None = None
) -> list[alt.Chart]:
    """Return the layers of speeds: bars with ranges of those that are ranked, hollow points of the others."""
    known = [(line, line.standing.speed) for line in lines if line.speed]
    shown = format_numbers([speed.median if speed else None for _, speed in known], ONE)
    values = [
        line.datum(
            value=speed.median,
            low=speed.low,
            high=speed.high,
            runs=speed.runs,
            total=speed.high if speed.is_ranked else speed.median,
            shown=text if speed.is_ranked else f"{text} (n = {speed.runs})",
        )
        for (line, speed), text in zip(known, shown, strict=True)
        if speed
    ]
    is_ranked = {line.label: line.is_ranked for line in lines}
    ranked = [datum for datum in values if is_ranked[datum["label"]]]
    single = [datum for datum in values if not is_ranked[datum["label"]]]
    y = bar_marks.label_axis(labels)
    tooltip = marks.tooltips(
        ("value:Q", f"{TOKENS}, median", ",.2f"),
        ("low:Q", "slowest run", ",.2f"),
        ("high:Q", "fastest run", ",.2f"),
        ("runs:Q", "undisturbed runs", "d"),
    )
    value, low, high = (bar_marks.from_zero(field, title, ticks) for field in ("value", "low", "high"))
    color = marks.strategy_color(view)
    with_range = bar_marks.bar_layer(ranked)
    hollow = bar_marks.bar_layer(single).mark_point(filled=False, size=55, strokeWidth=2)
    layers = [
        with_range.mark_bar().encode(x=value, y=y, color=color, tooltip=tooltip),
        with_range.mark_rule(style="spread").encode(x=low, x2="high:Q", y=y, tooltip=tooltip),
        *(
            with_range.mark_tick(style="spread", size=8, thickness=1.5).encode(x=end, y=y, tooltip=tooltip)
            for end in (low, high)
        ),
    ]
    layers = layers if ranked else []
    layers += [hollow.encode(x=value, y=y, color=color, tooltip=tooltip)] if single else []
    text = bar_marks.bar_layer(values).mark_text(align="left", dx=7, style="value")
    return [*layers, text.encode(x=bar_marks.from_zero("total", title), y=y, text="shown:N")] if values else layers


def _speed_columns(lines: Sequence[ChartLine]) -> dict[str, list[str]]:
    """Return median, range and number of runs of every line whose speed is known."""
    speeds = [line.standing.speed if line.ok else None for line in lines]
    columns = {"run": [line.label for line in lines], "status": list(map(bar_marks.state, lines))}
    for title, name in ((TOKENS, "median"), ("slowest run", "low"), ("fastest run", "high")):
        texts = format_numbers([None if speed is None else getattr(speed, name) for speed in speeds], ONE)
        columns[title] = [text if line.is_timed else "" for line, text in zip(lines, texts, strict=True)]
    columns["runs"] = [
        str(speed.runs) if speed and line.is_timed else "" for line, speed in zip(lines, speeds, strict=True)
    ]
    return columns


def scaling(view: View) -> Chart | None:
    """Draw tokens per second over ranks, and linear scaling from the fewest ranks."""
    series = by_world(chart_lines(view)) if view.draws_speeds else []
    if not series:
        return None
    drawn = select(series)
    points = [
        curve.datum(x=_world(line), y=line.speed, ideal=ideal, efficiency=100 * (line.speed or 0) / ideal)
        for curve in drawn
        for line, ideal in zip(curve.points, _ideal(curve), strict=True)
    ]
    all_ranked = all(line.is_ranked for curve in drawn for line in curve.points)
    text = (
        f"Tokens per second of {pluralize(len(drawn), 'configuration')} on {_count(points)} ranks, compared with linear"
        " scaling from the fewest ranks of each; efficiency on the most ranks in %:"
        f" {range_text([(curve.name, _efficiency(curve)) for curve in drawn])}."
        + ("" if all_ranked else f" Some points are of fewer than {MINIMUM_RUNS} repeats, and rank nothing.")
        + untimed_text(chart_lines(view))
    )
    worlds = sorted({point["x"] for point in points})
    wide = worlds[-1] / worlds[0] > _WIDE
    highest = max(max(point["y"], point["ideal"]) for point in points)
    lowest = min(point["y"] for point in points)
    across = (worlds[0] / 1.1, worlds[-1] * 1.1) if wide else (0.0, worlds[-1] * 1.03)
    up = (lowest / 1.2, highest * 1.2) if wide else (0.0, highest * 1.05)
    scales = (
        Scale("number of ranks", across, wide, worlds, "d"),
        Scale(TOKENS, up, wide),
    )
    tooltip = marks.tooltips(
        ("x:Q", "ranks", ",d"),
        ("y:Q", "tokens per second", ",.2f"),
        ("ideal:Q", "linear scaling", ",.2f"),
        ("efficiency:Q", "efficiency, %", ".2f"),
    )
    x, ideal, color = scales[0].channel("x", "x"), scales[1].channel("y", "ideal"), marks.strategy_color(view)
    linear = (
        points,
        lambda layer: layer.mark_line(style="reference", opacity=0.6).encode(
            x=x, y=ideal, color=color, detail="label:N"
        ),
    )
    name = "Tokens per second by number of ranks (dotted: linear scaling)"
    table = _scaling_table(drawn)
    return curves(view, "scaling", name, text, series, points, scales, tooltip, table, behind=[linear])


def _world(line: ChartLine) -> float:
    return line.number("world_size") or 0.0


def _ideal(series: Series) -> list[float]:
    fewest = series.points[0]
    return [(fewest.speed or 0.0) * _world(line) / _world(fewest) for line in series.points]


def _efficiency(series: Series) -> float:
    return 100 * (series.points[-1].speed or 0.0) / _ideal(series)[-1]


def _count(points: Sequence[Datum]) -> str:
    worlds = sorted({int(point["x"]) for point in points})
    return join_words([str(world) for world in worlds])


def _scaling_table(drawn: Sequence[Series]) -> Table:
    pairs = [(series, line) for series in drawn for line in series.points]
    ideals = [ideal for series in drawn for ideal in _ideal(series)]
    speeds = [line.speed or 0.0 for _, line in pairs]
    columns = {
        "run": [series.name for series, _ in pairs],
        "ranks": [str(line.row["world_size"]) for _, line in pairs],
        "tokens per second": format_numbers(speeds, ONE),
        "linear scaling": format_numbers(ideals, ONE),
        "efficiency (%)": format_percents([speed / ideal for speed, ideal in zip(speeds, ideals, strict=True)]),
    }
    return value_table([series.strategy for series, _ in pairs], columns)
