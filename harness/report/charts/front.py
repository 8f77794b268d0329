"""The chart of peak memory against speed, with the front of configurations that no other beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.cost_model.prediction import Prediction
from harness.report.charts import marks, style
from harness.report.charts.lines import ChartLine, Datum, chart_lines, omitted_text, range_text, value_table
from harness.report.charts.style import alt
from harness.report.comparability import group_by
from harness.report.document import Chart, Table, VegaLite
from harness.report.reported import group_titles
from harness.report.speeds import CLEARANCE, DISJOINT_RUNS, MINIMUM_RUNS
from harness.report.text import ONE, Unit, byte_unit, format_numbers, pluralize
from harness.report.view import View
from harness.util.text import sanitize

_MOST_POINTS = 200  # of one chart

_MOST_FRONTS = 3  # groups of comparable configurations that are drawn beside each other


def trade(view: View) -> Chart | None:
    """Draw peak memory against speed, for each of the largest groups of comparable configurations.

    The front connects ranked configurations by memory, each certainly faster than those before it. It is worked out
    over all of them, and again by the page over those that are visible.
    """
    lines = [line for line in chart_lines(view) if line.speed and line.peak] if view.draws_speeds else []
    by_group = group_by(lines, lambda line: line.standing.group)
    shown = {number: group for number, group in sorted(by_group.items()) if len(group) > 1}
    shown = dict(list(shown.items())[:_MOST_FRONTS])
    drawn = [line for group in shown.values() for line in _drawn(group)]
    if not drawn:
        return None
    total = sum(map(len, shown.values()))
    unit = byte_unit([line.peak for line in drawn])
    points = [_point(line, unit) for line in drawn]
    alt_text = (
        f"Peak memory in {unit.name} against {_RATE} of {pluralize(len(drawn), 'configuration')}"
        f"{_group_text(len(shown), len(by_group))}. {_front_text(shown)} Peaks"
        f" {range_text([(point['label'], point['y']) for point in points])}, {_RATE}"
        f" {range_text([(point['label'], point['x']) for point in points])}."
        f"{omitted_text(len(drawn), total, 'all that can be on a front, then the others in the order of the report')}"
    )
    name = "Peak memory and speed"
    width = (style.WIDTH - _COLUMNS * _BESIDE) // _COLUMNS
    size = marks.PLOT if len(shown) == 1 else (width, _PANEL)
    panels = [_trade_layers(view, [p for p in points if p["group"] == number], unit, size) for number in shown]
    if len(panels) == 1:
        vega_lite = marks.spec(view, name, panels[0], alt_text)
    else:
        titles = [sanitize(title[:1].upper() + title[1:]) for title in group_titles(view)]
        heads = [alt.TitleParams(titles[number or 0], fontSize=style.FONT_SIZE, offset=4) for number in shown]
        cells = [
            alt.layer(*layers).properties(width=width, height=_PANEL, title=head)
            for layers, head in zip(panels, heads, strict=True)
        ]
        chart = marks.panels(alt.concat(*cells, columns=_COLUMNS), _COLUMNS, _COLUMNS * _BESIDE, (1, _BESIDE))
        vega_lite = marks.finish(view, name, chart, alt_text)
    candidates = [_candidate(line) for group in shown.values() for line in group if line.is_ranked]
    vega_lite["params"] += [{"name": "front", "value": [line.position for line in drawn if line.standing.is_on_front]}]
    vega_lite["usermeta"] |= {"candidates": candidates, "clearance": CLEARANCE, "disjointRuns": DISJOINT_RUNS}
    return Chart("trade", name, alt_text, vega_lite, _trade_table(drawn, unit), 2)


_RATE = "tokens per second"

_COLUMNS, _PANEL, _BESIDE = 2, 280, 64  # plots beside each other; pixels: the height of each, and what lies beside it


def _drawn(group: Sequence[ChartLine]) -> list[ChartLine]:
    """Return the lines to draw: if there are too many, first those that can be on a front when strategies are hidden.

    Such a line is on the front of its own strategy.
    """
    if len(group) <= _MOST_POINTS:
        return list(group)
    own = {line.position for line in group if line.standing.is_on_front}
    for members in group_by([line for line in group if line.is_ranked], lambda line: line.strategy).values():
        highest = 0.0
        for line in sorted(members, key=lambda line: (line.peak or 0.0, -(line.speed or 0.0))):
            if (line.speed or 0.0) > highest:
                highest = line.speed or 0.0
                own.add(line.position)
    first = [line for line in group if line.position in own]
    others = [line for line in group if line.position not in own]
    positions = {line.position for line in [*first, *others[: max(0, _MOST_POINTS - len(first))]]}
    return [line for line in group if line.position in positions]


def _point(line: ChartLine, unit: Unit) -> Datum:
    speed = line.standing.speed
    return line.datum(
        x=line.speed,
        y=(line.peak or 0.0) / unit.size,
        low=speed.low if speed else None,
        high=speed.high if speed else None,
        runs=speed.runs if speed else None,
        ranked=line.is_ranked,
        group=line.standing.group,
        first=line.standing.is_on_front,
        name=line.label.removesuffix(f" on {pluralize(line.row.get('world_size') or 1, 'rank')}"),
    )


def _candidate(line: ChartLine) -> list[Any]:
    """Return what the page works a front out from.

    It is position, strategy, group and peak, the slowest, median and fastest run, and the number of runs.
    """
    speed = line.standing.speed
    runs = (speed.low, speed.median, speed.high, speed.runs) if speed else ()
    return [line.position, line.strategy, line.standing.group, line.peak, *runs]


def _group_text(shown: int, groups: int) -> str:
    if groups == 1:
        return ""
    return f", of {'the largest' if shown == 1 else f'{shown}'} of {groups} groups of comparable ones"


def _front_text(shown: Mapping[int | None, Sequence[ChartLine]]) -> str:
    """Return which configurations are on a front; speeds of too few repeats are on none."""
    fronts = [
        sorted((line for line in group if line.standing.is_on_front), key=lambda line: line.peak or 0.0)
        for group in shown.values()
    ]
    names = [", ".join(line.label for line in front) for front in fronts if front]
    if not names:
        return f"No front is drawn: no speed here has {MINIMUM_RUNS} undisturbed repeats."
    return f"On the front, each certainly faster than those before it: {'; '.join(names)}."


def _trade_layers(view: View, points: Sequence[Datum], unit: Unit, size: tuple[float, float]) -> list[alt.Chart]:
    """Return the front, the ranges of the speeds, their points and labels, in a plot of this size in pixels."""
    x = marks.spanning("x", f"{_RATE} (higher is better)", [p[at] for p in points for at in ("x", "low", "high")])
    y = marks.spanning("y", f"peak memory ({unit.name}, lower is better)", [point["y"] for point in points])
    tooltip = marks.tooltips(
        ("x:Q", f"{_RATE}, median", ",.2f"),
        ("low:Q", "slowest run", ",.2f"),
        ("high:Q", "fastest run", ",.2f"),
        ("runs:Q", "undisturbed runs", "d"),
        ("y:Q", f"peak, {unit.name}", ",.4~f"),
    )
    ranked, single = ([point for point in points if point["ranked"] is is_ranked] for is_ranked in (True, False))
    front = sorted((point for point in points if point["first"]), key=lambda point: point["x"])
    color = marks.strategy_color(view)
    layers = []
    if ranked:
        on_front = marks.filterable_layer(ranked).transform_filter("indexof(front, datum.position) >= 0")
        line = on_front.mark_line(style="front").encode(x=x, y=y, order=alt.Order("x:Q"))
        dots = marks.filterable_layer(ranked).mark_point(filled=True, size=80, opacity=1)
        layers += [
            line,
            marks.filterable_layer(ranked).mark_rule(style="spread").encode(x=_same(x, "low"), x2="high:Q", y=y),
            dots.encode(x=x, y=y, color=color, tooltip=tooltip),
        ]
    if single:
        hollow = marks.filterable_layer(single).mark_point(filled=False, size=70, strokeWidth=2)
        layers.append(hollow.encode(x=x, y=y, color=color, tooltip=tooltip))
    ranges = [[point | {"x": point[end]} for end in ("low", "high")] for point in ranked]
    return [*layers, *marks.labels(points, x, y, [front, *ranges], size)]


def _same(x: alt.X, field: str) -> alt.X:
    """Return the channel of another field on the same axis."""
    channel: Any = x.to_dict()
    return alt.X(f"{field}:Q", title=channel["title"], scale=alt.Scale(**channel["scale"]))


def _trade_table(drawn: Sequence[ChartLine], unit: Unit) -> Table:
    """Return the drawn lines with their peaks, speeds, repeats, and whether each is on the front."""
    columns = {
        "run": [line.label for line in drawn],
        f"peak ({unit.name})": format_numbers([line.peak for line in drawn], unit),
        _RATE: format_numbers([line.speed for line in drawn], ONE),
        "runs": [str(line.standing.speed.runs) if line.standing.speed else "" for line in drawn],
        "on the front": ["yes" if line.standing.is_on_front else "" for line in drawn],
    }
    return value_table([line.strategy for line in drawn], columns)


GIB = 2**30

_MEMORY, _SPEED = "memory that a device must have (GiB)", "tokens per second (higher is better)"

_PLACE = {"type": "quantitative", "scale": {"zero": True, "nice": True}}


def front_sentence(front: Sequence[Prediction]) -> str:
    """Return the front in one sentence."""
    if not front:
        return "No layout of this model has a place on a front of memory against speed."
    first, last = front[0], front[-1]
    if len(front) == 1:
        return (
            f"One layout alone is on the front, with {first.tokens_per_second:,.0f} tokens/s in {_gib(first):.1f} GiB."
        )
    return (
        f"{len(front)} layouts are on the front, as no layout that needs less memory is faster: from"
        f" {last.tokens_per_second:,.0f} tokens/s in {_gib(last):.1f} GiB to {first.tokens_per_second:,.0f} tokens/s in"
        f" {_gib(first):.1f} GiB of a device."
    )


def front_chart(front: Sequence[Prediction]) -> Chart | None:
    """Draw the front, with the memory of the devices; None where there is nothing to draw."""
    if not front:
        return None
    first = front[0]
    kinds = list(dict.fromkeys(kind_of(entry) for entry in front))
    colors = style.strategy_colors(kinds)
    points = [
        {
            "x": round(_gib(entry), 3),
            "y": round(entry.tokens_per_second, 3),
            "label": entry.label(),
            "kind": kind_of(entry),
        }
        for entry in front
    ]
    limit = first.available_bytes / GIB
    sentence = front_sentence(front)
    place = {"x": {"field": "x", "title": _MEMORY, **_PLACE}, "y": {"field": "y", "title": _SPEED, **_PLACE}}
    tooltip = [
        {"field": "label", "title": "layout"},
        {"field": "x", "type": "quantitative", "format": ",.1f", "title": "GiB of a device"},
        {"field": "y", "type": "quantitative", "format": ",.0f", "title": "tokens per second"},
    ]
    color = {
        "field": "kind",
        "type": "nominal",
        "title": "model state",
        "scale": {"domain": kinds, "range": [colors[kind] for kind in kinds]},
        "legend": {"orient": "bottom", "columns": 4},
    }
    line = {"type": "line", "interpolate": "step-after", "style": "front"}
    at_limit = {"x": {"datum": limit, "type": "quantitative"}}
    words = {"type": "text", "align": "right", "dx": -4, "dy": 4, "baseline": "top", "style": "value"}
    spec: VegaLite = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {
            "text": "Memory and speed",
            "subtitle": [f"{first.config.model.name} on {first.layout.world_size} devices of {first.cluster.name}"],
        },
        "description": sentence,
        "width": style.WIDTH,
        "height": style.HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 20, "top": 4, "right": 8, "bottom": 4},
        "usermeta": {"fluid": True},
        "params": [{"name": "hidden", "value": []}],
        "datasets": {"front": points},
        "layer": [
            {"data": {"name": "front"}, "mark": line, "encoding": place | {"order": {"field": "x"}}},
            {"data": {"values": [{}]}, "mark": {"type": "rule", "style": "limit"}, "encoding": at_limit},
            {
                "data": {"values": [{}]},
                "mark": words,
                "encoding": at_limit | {"y": {"value": 0}, "text": {"value": f"a device: {limit:.1f} GiB"}},
            },
            {
                "data": {"name": "front"},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": place | {"color": color, "tooltip": tooltip},
            },
        ],
    }
    rows = [(entry.label(), f"{_gib(entry):.1f}", f"{entry.tokens_per_second:,.0f}") for entry in front]
    return Chart("front", "Memory and speed", sentence, spec, Table(["layout", "GiB of a device", "tokens/s"], rows))


def kind_of(prediction: Prediction) -> str:
    """Return how a layout shares model state among data-parallel ranks, in two words."""
    layout = prediction.layout
    if layout.zero_stage:
        return f"ZeRO-{layout.zero_stage}"
    return "replicas" if layout.dp > 1 else "no data parallelism"


def _gib(prediction: Prediction) -> float:
    return prediction.needed_bytes / GIB
