"""Charts of speed: tokens per second with their spread, the parts of a step, and tokens per second over ranks."""

from collections.abc import Sequence

from harness.report.charts import marks, style
from harness.report.charts.lines import (
    ChartLine,
    Datum,
    chart_lines,
    failure_text,
    finite_number,
    median_record,
    omitted_text,
    part_data,
    range_text,
    select,
    value_table,
)
from harness.report.charts.series import Series, by_world
from harness.report.charts.style import alt
from harness.report.document import Chart, Table
from harness.report.labels import STEP_PARTS
from harness.report.spread import spread
from harness.report.text import MILLISECONDS, ONE, format_numbers, format_percents, join_words, pluralize
from harness.report.view import View

_WIDE = 8  # if the most ranks over the fewest exceed this, both axes are logarithmic


def throughput(view: View) -> Chart | None:
    """Draw tokens per second of every line, with the spread of its runs or steps."""
    lines = chart_lines(view)
    if not any(line.speed for line in lines):
        return None
    drawn = select(lines)
    ok = [(line, line.speed, finite_number(spread(line.row))) for line in drawn if line.speed]
    alt_text = (
        f"Tokens per second of {pluralize(len(ok), 'configuration')},"
        f" {range_text([(line.label, speed) for line, speed, _ in ok])}."
        f"{_spread_text([line for line, *_ in ok])}"
        f"{failure_text(drawn)}{omitted_text(len(drawn), len(lines))}"
    )
    title = "tokens per second"
    shown = format_numbers([speed for _, speed, _ in ok], ONE)
    values = [
        line.datum(
            value=speed,
            total=speed * (1 + (relative_spread or 0)),
            low=max(0.0, speed * (1 - (relative_spread or 0))),
            shown=text,
            apart=None if relative_spread is None else 100 * relative_spread,
        )
        for (line, speed, relative_spread), text in zip(ok, shown, strict=True)
    ]
    y = marks.label_axis()
    tooltip = marks.tooltips(("value:Q", "tokens per second", ",.2f"), ("apart:Q", "spread, ± %", ".2f"))
    bar = marks.filterable_layer(values).mark_bar(color=style.MEASURED)
    with_spread = marks.filterable_layer([datum for datum in values if datum["apart"]])
    low = marks.from_zero("low", title)
    layers = [
        bar.encode(x=marks.from_zero("value", title), y=y, tooltip=tooltip),
        with_spread.mark_rule(style="spread").encode(x=low, x2="total:Q", y=y, tooltip=tooltip),
        *(
            with_spread.mark_tick(style="spread", size=8, thickness=1.5).encode(x=end, y=y, tooltip=tooltip)
            for end in (low, marks.from_zero("total", title))
        ),
        marks.numbers(values, title),
        *marks.failures(drawn, title),
    ]
    rows = [
        (
            line.label,
            line.status,
            *format_numbers([line.speed], ONE),
            *format_percents([finite_number(spread(line.row))]),
        )
        for line in drawn
    ]
    table = value_table(["run", "status", title, "spread (± %)"], rows, [line.strategy for line in drawn], 2)
    return Chart("throughput", "Tokens per second", alt_text, marks.bars(layers, alt_text, len(drawn)), table)


def _spread_text(lines: Sequence[ChartLine]) -> str:
    kinds = {line.row.get("between_runs") is not None for line in lines if spread(line.row) is not None}
    words = {True: "half the range of the repeated runs", False: "half the interquartile range of a run's steps"}
    text = " or ".join(words[kind] for kind in sorted(kinds, reverse=True))
    return f" Error bars extend to either side by {text}." if text else ""


def step(view: View) -> Chart | None:
    """Draw the parts of the step time of every line's median repeat."""
    lines = chart_lines(view)
    drawn = select(lines)
    segments = [datum for line in drawn for datum in _step_parts(line)]
    if not segments:
        return None
    totals: dict[str, float] = {}
    for datum in segments:
        totals[datum["label"]] = totals.get(datum["label"], 0.0) + datum["exact"]
    names = [name for name in STEP_PARTS.values() if any(datum["part"] == name for datum in segments)]
    alt_text = (
        f"Step time of {pluralize(len(totals), 'configuration')} in ms, stacked by its parts, {', '.join(names)}:"
        f" {range_text([(label, total / 1e-3) for label, total in totals.items()])}."
        + (
            " Repeated runs are represented by the one with the median speed."
            if any(line.is_repeated for line in drawn)
            else ""
        )
        + failure_text(drawn)
        + omitted_text(len(drawn), len(lines))
    )
    title = "step time (ms)"
    shown = dict(zip(totals, format_numbers(list(totals.values()), MILLISECONDS), strict=True))
    figures = [
        line.datum(total=totals[line.label] / 1e-3, shown=shown[line.label]) for line in drawn if line.label in totals
    ]
    layers = [
        marks.stacked(segments, title, ("value:Q", "ms", ",.4f"), tuple(STEP_PARTS.values())),
        marks.numbers(figures, title),
        *marks.failures(drawn, title),
    ]
    rows = []
    for line in drawn:
        parts = {datum["part"]: datum["exact"] for datum in _step_parts(line)}
        sizes = [*(parts.get(name) for name in names), totals.get(line.label)]
        rows.append((line.label, line.status, *format_numbers(sizes, MILLISECONDS)))
    header = ["run", "status", *(f"{name} (ms)" for name in names), "step time (ms)"]
    table = value_table(header, rows, [line.strategy for line in drawn], 2)
    return Chart("step", "Breakdown of step time", alt_text, marks.bars(layers, alt_text, len(drawn)), table)


def _step_parts(line: ChartLine) -> list[Datum]:
    return part_data(line, median_record(line).row, STEP_PARTS, MILLISECONDS.size) if line.ok else []


def scaling(view: View) -> Chart | None:
    """Draw tokens per second over ranks, and linear scaling from the fewest ranks."""
    curves = by_world(chart_lines(view))
    if not curves:
        return None
    drawn = select(curves)
    points = [
        series.datum(x=_world(line), y=line.speed, ideal=ideal, efficiency=100 * (line.speed or 0) / ideal)
        for series in drawn
        for line, ideal in zip(series.points, _ideal(series), strict=True)
    ]
    alt_text = (
        f"Tokens per second of {pluralize(len(drawn), 'configuration')} on {_count(points)} ranks, compared with linear"
        " scaling from the fewest ranks of each; efficiency on the most ranks in %:"
        f" {range_text([(series.name, _efficiency(series)) for series in drawn])}."
        f"{omitted_text(len(drawn), len(curves))}"
    )
    worlds = sorted({point["x"] for point in points})
    wide = worlds[-1] / worlds[0] > _WIDE
    rising = alt.Scale(type="log", nice=False) if wide else alt.Scale(zero=True)
    scale = alt.Scale(type="log", base=2, nice=False) if wide else alt.Scale(zero=True)
    x = alt.X("x:Q", title="number of ranks", scale=scale, axis=alt.Axis(values=worlds, format="d"))
    y, ideal = (
        alt.Y(f"{field}:Q", title="tokens per second (dashed = linear scaling)", scale=rising)
        for field in ("y", "ideal")
    )
    channels = marks.by_label([series.name for series in drawn])
    tooltip = marks.tooltips(
        ("x:Q", "ranks", ",d"),
        ("y:Q", "tokens per second", ",.2f"),
        ("ideal:Q", "linear scaling", ",.2f"),
        ("efficiency:Q", "efficiency, %", ".2f"),
    )
    layers = [
        *marks.curves(points, x, y, tooltip, channels),
        marks.filterable_layer(points)
        .mark_line(style="reference", opacity=0.6)
        .encode(x=x, y=ideal, stroke=channels.stroke),
    ]
    return Chart(
        "scaling", "Tokens per second by number of ranks", alt_text, marks.spec(layers, alt_text), _scaling_table(drawn)
    )


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
    pairs = [
        (series, line, ideal) for series in drawn for line, ideal in zip(series.points, _ideal(series), strict=True)
    ]
    speeds, ideals = (
        format_numbers([line.speed for _, line, _ in pairs], ONE),
        format_numbers([i for *_, i in pairs], ONE),
    )
    efficiencies = format_percents([(line.speed or 0.0) / ideal for _, line, ideal in pairs])
    rows = [
        (series.name, str(line.row["world_size"]), *texts)
        for (series, line, _), texts in zip(pairs, zip(speeds, ideals, efficiencies, strict=True), strict=True)
    ]
    header = ["run", "ranks", "tokens per second", "linear scaling", "efficiency (%)"]
    return value_table(header, rows, [series.strategy for series, *_ in pairs])
