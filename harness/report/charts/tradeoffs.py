"""Charts of what memory costs: peak memory against speed, and what checkpointing saves against its time."""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.report.charts import marks, style
from harness.report.charts.bars import bars, ordered
from harness.report.charts.marks import Field, Rows, axis, bytes_field, column, numbers, spanning, unseen, words
from harness.report.charts.points import Points
from harness.report.charts.setting import setting_lines
from harness.report.claim_peers import ok_runs, peer
from harness.report.comparability import group_by
from harness.report.comparison_columns import UNSETTLED_MARK
from harness.report.document import Chart, VegaLite
from harness.report.lines import Datum, Line
from harness.report.speeds import CLEARANCE, DISJOINT_RUNS, are_alike
from harness.report.text import ONE, format_percents, pluralize
from harness.report.view import View
from harness.util.text import sanitize

_ROOM = 90  # pixels behind the longest bar for the time added

_MOST_POINTS = 200  # of one chart

_MOST_FRONTS = 3  # groups of comparable configurations that are drawn beside each other

_RULE = "all that can be on a front, then the others in the order of the report"

_RATE = "tokens per second"


def trade(view: View) -> Chart | None:
    """Draw peak memory against speed, for each of the largest groups of comparable configurations.

    The front connects ranked configurations by memory, each certainly faster than those before it. It is worked out
    over all of them, and again by the page over those that are visible.
    """
    lines = [line for line in view.lines if line.drawn_speed and line.peak] if view.draws_speeds else []
    by_group = group_by(lines, lambda line: line.group)
    shown = dict([entry for entry in sorted(by_group.items()) if len(entry[1]) > 1][:_MOST_FRONTS])
    drawn = {number: _drawn(group) for number, group in shown.items()}
    if not drawn:
        return None
    lines = [line for group in drawn.values() for line in group]
    rows = _rows(lines)
    columns, height, beside = (1, style.HEIGHT, 29) if len(drawn) == 1 else (2, 280, 45)  # pixels
    size = (style.plot_width(style.WIDTH, columns, beside), height)
    labels: dict[str, list[Datum]] = {}
    cells: list[VegaLite] = []
    for number in drawn:
        name, title = f"labels{number}", view.groups[number or 0].title
        layers, labels[name] = _panel(view, rows, number, name, size)
        head = {"text": sanitize(title[:1].upper() + title[1:]), "fontSize": style.FONT_SIZE, "offset": 4}
        own = [{"filter": f"datum.group === {number}"}]
        cells.append({"layer": layers, "title": head, "transform": own, "width": size[0], "height": height})
    candidates = [_candidate(line) for group in shown.values() for line in group if line.speed.is_ranked]
    meta = {"beside": beside, "candidates": candidates, "clearance": CLEARANCE, "disjointRuns": DISJOINT_RUNS}
    plot = {"concat": cells, "columns": columns, "usermeta": meta}
    fronts = [sorted(filter(_is_on_front, group), key=lambda line: line.peak or 0.0) for group in shown.values()]
    facts = {
        "fronts": [", ".join(line.label for line in front) for front in fronts if front],
        "shown": len(shown),
        "groups": len(by_group),
    }
    total, setting = sum(map(len, shown.values())), setting_lines(view)
    front = {"front": [line.position for line in filter(_is_on_front, lines)]}
    name = "Peak memory and speed"
    return marks.draw("trade", name, setting, rows, "x", plot, facts, labels, rule=_RULE, total=total, params=front)


def _drawn(group: Sequence[Line]) -> list[Line]:
    """Return the lines to draw: if there are too many, first those that can be on a front when strategies are hidden.

    Such a line is on the front of its own strategy.
    """
    ranked = sorted(
        (line for line in group if line.speed.is_ranked), key=lambda line: (line.peak, -(line.drawn_speed or 0.0))
    )
    own = {line.position for line in filter(_is_on_front, group)}
    fastest: dict[str, float] = {}
    for line in ranked:
        if (line.drawn_speed or 0.0) > fastest.get(line.strategy, 0.0):
            fastest[line.strategy] = line.drawn_speed or 0.0
            own.add(line.position)
    first = sorted(group, key=lambda line: line.position not in own)[:_MOST_POINTS]
    return sorted(first, key=lambda line: line.position)


def _rows(lines: Sequence[Line]) -> Rows:
    """Return the lines with their peaks, speeds, repeats, and whether each is on the front."""
    peaks, speeds = [line.peak for line in lines], [line.speed for line in lines]
    fields = {
        "y": bytes_field("peak", peaks),
        "x": numbers(_RATE, [speed.median for speed in speeds], ONE, ",.2f"),
        "low": Field("slowest run", [speed.low for speed in speeds], form=",.2f"),
        "high": Field("fastest run", [speed.high for speed in speeds], form=",.2f"),
        "runs": Field("runs", [speed.runs for speed in speeds], [str(speed.runs) for speed in speeds], "d"),
        "on": column("on the front", ["yes" if line.is_on_front else "" for line in lines]),
        "first": unseen([line.is_on_front for line in lines]),
        "ranked": unseen([speed.is_ranked for speed in speeds]),
        "group": unseen([line.group for line in lines]),
        "name": unseen(
            [line.label.removesuffix(f" on {pluralize(line.row.get('world_size') or 1, 'rank')}") for line in lines]
        ),
    }
    return Rows(lines, fields)


def _candidate(line: Line) -> list[Any]:
    """Return what the page works a front out from.

    It is position, strategy, group and peak, the slowest, median and fastest run, and the number of runs.
    """
    speed = line.speed
    place = [line.position, line.strategy, line.group, line.peak]
    return [*place, speed.low, speed.median, speed.high, speed.runs]


def _is_on_front(line: Line) -> bool:
    return line.is_on_front


def _panel(
    view: View, rows: Rows, number: int | None, name: str, size: tuple[int, int]
) -> tuple[list[VegaLite], list[Datum]]:
    """Return the front, the ranges of the speeds, their points and labels of a group, and the data of the labels."""
    points = [datum for datum in rows.data if datum["group"] == number]
    x = spanning(f"{_RATE} (higher is better)", [point[at] for point in points for at in ("x", "low", "high")])
    y = spanning(rows.fields["y"].title.replace(")", ", lower is better)"), [point["y"] for point in points])
    plot = Points(view, rows, x, y)
    front = sorted((point for point in points if point["first"]), key=lambda point: point["x"])
    ranges = [[point | {"x": point[end]} for end in ("low", "high")] for point in points if point["ranked"]]
    order = {"field": "x", "type": "quantitative"}
    layers = [
        plot.mark("line front", test="datum.ranked && indexof(front, datum.position) >= 0", order=order),
        plot.mark("rule spread", "low", test="datum.ranked", x2="high"),
        plot.mark("point", test="datum.ranked"),
        plot.mark("point hollow", test="!datum.ranked"),
        plot.labels(name),
    ]
    return layers, plot.placed(points, [front, *ranges], size)


def checkpointing(view: View) -> Chart | None:
    """Draw the memory that each kind of checkpointing saves, with the time it costs if that is ranked.

    Each is relative to the same run without checkpointing. The largest saving comes first.
    """
    pairs = {line.label: (line, plain) for line, plain in _pairs(view)}
    if not pairs:
        return None
    lines = ordered(
        [line for line, _ in pairs.values()], lambda line: _change(*pairs[line.label], "peak_allocated_bytes")
    )
    peaks, activations = (
        [_change(*pairs[line.label], name) for line in lines] for name in ("peak_allocated_bytes", "activation_bytes")
    )
    costs = [_cost(*pairs[line.label]) for line in lines]
    cells = [f"{format_percents([cost])[0]}{mark}" for cost, mark in costs]
    fields = {
        "kind": words("checkpointing", [sanitize(line.row["checkpointing"]) for line in lines]),
        "value": _saved("peak memory saved (%)", peaks),
        "activations": _saved("activations saved (%)", activations),
        "cost": Field("step time added (%)", [cost and 100 * cost for cost, _ in costs], cells, "+.2f"),
        "shown": unseen([None if cost is None else f"{100 * cost:+.0f} %{mark}" for cost, mark in costs]),
    }
    saved = zip(fields["value"].values, fields["activations"].values, strict=True)
    fields["total"] = unseen([max(peak, part or 0.0, 0.0) for peak, part in saved])
    uncertain = [line.label for line, (_, mark) in zip(lines, costs, strict=True) if mark]
    figure = f", figure: step time added{f', {UNSETTLED_MARK}: not certain' * bool(uncertain)}"
    title = f"memory saved (%; bar: peak, |: activations{figure * any(cells)})"
    plot = bars(view, lines, fields, axis(title))
    layers = [plot.mark("bar", "value", "bar"), plot.mark("tick formula", "activations", "bar")]
    name = "Memory savings and cost of activation checkpointing" if any(cells) else "Memory saved by checkpointing"
    facts = {"has_costs": any(cells), "uncertain": uncertain}
    return plot.chart("checkpointing", name, "value", layers, _ROOM * any(cells), facts=facts)


def _pairs(view: View) -> Iterator[tuple[Line, Line]]:
    """Yield the lines that checkpoint, each with its peer that does not, of which both peaks are known."""
    runs = ok_runs(view.lines)
    for run in runs:
        if run.get("checkpointing") not in (None, "none"):
            plain = peer(run, runs, checkpointing="none")
            if plain and _change(run["line"], plain["line"], "peak_allocated_bytes") is not None:
                yield run["line"], plain["line"]


def _change(line: Line, plain: Line, name: str) -> float | None:
    """Return the relative increase of a column."""
    old, new = plain.number(name), line.number(name)
    return new / old - 1 if old and new is not None else None


def _cost(line: Line, plain: Line) -> tuple[float | None, str]:
    """Return the relative increase of step time, if both speeds are ranked, and the mark of one that is not certain."""
    speeds = line.speed, plain.speed
    cost = _change(line, plain, "step_seconds")
    if cost is None or not all(speed.is_ranked or speed.is_simulated for speed in speeds):
        return None, ""
    return cost, UNSETTLED_MARK * (not line.speed.is_simulated and are_alike(*speeds))


def _saved(title: str, changes: Sequence[float | None]) -> Field:
    shares = [None if change is None else -change for change in changes]
    return Field(title, [share and 100 * share for share in shares], format_percents(shares), ".2f")
