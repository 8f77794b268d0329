"""Charts of memory and speed together: what memory costs, what checkpointing saves, and the first screen's picture."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from harness.report.charts import style
from harness.report.charts.bars import LINES, Bars, bars, labels, ordered
from harness.report.charts.curves import Points
from harness.report.charts.marks import axis, draw, spanning
from harness.report.charts.rows import Field, Rows, bytes_field, column, numbers, unseen, words
from harness.report.charts.speed import TOKENS, speed_fields, speed_marks
from harness.report.claims import ok_runs, peer
from harness.report.columns import UNSETTLED_MARK
from harness.report.comparability import group_by
from harness.report.document import Chart, VegaLite
from harness.report.labels import value_text
from harness.report.lines import Datum, Line
from harness.report.speeds import CLEARANCE, DISJOINT_RUNS, are_alike
from harness.report.text import PERCENT, format_numbers
from harness.report.view import View
from harness.util.text import count_text, sanitize

_ROOM = 90  # pixels behind the longest bar for the time added

_MOST_FRONTS = 3  # groups of comparable configurations that are drawn beside each other


def trade(view: View) -> Chart | None:
    """Draw peak memory against speed, for each of the largest groups of comparable configurations.

    The front connects ranked configurations by memory, each certainly faster than those before it. It is worked out
    over all of them, and again by the page over those that are visible.
    """
    lines = [line for line in view.lines if line.drawn_speed and line.peak] if view.draws_speeds else []
    groups = group_by(lines, lambda line: line.group)
    shown = [number for number, members in sorted(groups.items()) if len(members) > 1][:_MOST_FRONTS]
    if not shown:
        return None
    lines = [line for number in shown for line in groups[number]]
    speeds = speed_fields(lines)
    fields = {
        "y": bytes_field("peak", [line.peak for line in lines]),
        "x": speeds["median"],
        "low": replace(speeds["low"], cells=()),
        "high": replace(speeds["high"], cells=()),
        "runs": speeds["runs"],
        "on": column("on the line", ["yes" if line.is_on_front else "" for line in lines]),
        "first": unseen([line.is_on_front for line in lines]),
        "ranked": speeds["ranked"],
        "group": unseen([line.group for line in lines]),
        "name": unseen(
            [line.label.removesuffix(f" on {count_text(line.row.get('world_size') or 1, 'rank')}") for line in lines]
        ),
    }
    rows = Rows(lines, fields)
    columns, height, beside = (1, style.HEIGHT, 29) if len(shown) == 1 else (2, 280, 45)  # pixels
    size = style.plot_width(style.WIDTH, columns, beside), height
    panels = [_panel(view, rows, number, size) for number in shown]
    labels = {f"labels{number}": placed for number, (_, placed) in zip(shown, panels, strict=True)}
    plot = {
        "concat": [cell for cell, _ in panels],
        "columns": columns,
        "usermeta": {"beside": beside, "clearance": CLEARANCE, "disjointRuns": DISJOINT_RUNS},
    }
    fronts = [", ".join(line.label for line in view.groups[number].front if line in groups[number]) for number in shown]
    return draw(
        view,
        "trade",
        "Peak memory and speed",
        rows,
        "x",
        plot,
        {"fronts": list(filter(None, fronts)), "shown": len(shown), "groups": len(groups)},
        labels,
        params={"front": [line.position for line in lines if line.is_on_front]},
    )


def _panel(view: View, rows: Rows, number: int, size: tuple[int, int]) -> tuple[VegaLite, list[Datum]]:
    """Return the plot of a group, with its front, points, ranges of speeds and labels; and the data of the labels."""
    points = [datum for datum in rows.data if datum["group"] == number]
    x = spanning(f"{TOKENS} (higher is better)", [point[at] for point in points for at in ("x", "low", "high")])
    y = spanning(rows.fields["y"].title.replace(")", ", lower is better)"), [point["y"] for point in points])
    plot = Points(view, rows, x, y)
    front = sorted((point for point in points if point["first"]), key=lambda point: point["x"])
    # On the page the plot may be twice as wide: a label that is clear of twice the range is clear of the range there.
    ranges = [
        [point | {"x": 2 * point[end] - point["x"]} for end in ("low", "high")] for point in points if point["ranked"]
    ]
    title = view.groups[number].title
    cell = {
        "layer": [
            plot.mark(
                "line front",
                test="datum.ranked && indexof(front, datum.position) >= 0",
                order={"field": "x", "type": "quantitative"},
            ),
            plot.mark("rule spread", "low", test="datum.ranked", x2="high"),
            plot.mark("point", test="datum.ranked"),
            plot.mark("point hollow", test="!datum.ranked"),
            *plot.labels(f"labels{number}"),
        ],
        "title": {"text": sanitize(title[:1].upper() + title[1:]), "fontSize": style.FONT_SIZE, "offset": 4},
        "transform": [{"filter": f"datum.group === {number}"}],
        "width": size[0],
        "height": size[1],
    }
    return cell, plot.placed(points, [front, *ranges], size)


def checkpointing(view: View) -> Chart | None:
    """Draw the memory that each kind of checkpointing saves, with the time it costs if that is ranked.

    Each is relative to the same run without checkpointing. The largest saving comes first.
    """
    pairs = sorted(_pairs(view), key=lambda pair: pair[0].ratio("peak_allocated_bytes", pair[1]) or 0.0)
    if not pairs:
        return None
    lines = [replace(line, position=place) for place, (line, _) in enumerate(pairs)]
    costs = [_cost(*pair) for pair in pairs]
    cells = [f"{format_numbers([cost], PERCENT)[0]}{mark}" for cost, mark in costs]
    fields = {
        "kind": words("checkpointing", [sanitize(line.row["checkpointing"]) for line in lines]),
        "value": _saved("peak memory saved (%)", "peak_allocated_bytes", pairs),
        "activations": _saved("activations saved (%)", "activation_bytes", pairs),
        "cost": Field("step time added (%)", [cost and 100 * cost for cost, _ in costs], cells, "+.2f"),
        "shown": unseen([None if cost is None else f"{100 * cost:+.0f} %{mark}" for cost, mark in costs]),
    }
    saved = zip(fields["value"].values, fields["activations"].values, strict=True)
    fields["total"] = unseen([max(peak, part or 0.0, 0.0) for peak, part in saved])
    uncertain = [line.label for line, (_, mark) in zip(lines, costs, strict=True) if mark]
    figure = f", figure: step time added{f', {UNSETTLED_MARK}: not certain' * bool(uncertain)}"
    plot = bars(view, lines, fields, axis(f"memory saved (%; bar: peak, |: activations{figure * any(cells)})"))
    return plot.chart(
        "checkpointing",
        "Memory savings and cost of activation checkpointing" if any(cells) else "Memory saved by checkpointing",
        "value",
        [plot.mark("bar", "value", "bar"), plot.mark("tick formula", "activations", "bar")],
        _ROOM * any(cells),
        facts={"has_costs": any(cells), "uncertain": uncertain},
    )


def _pairs(view: View) -> Iterator[tuple[Line, Line]]:
    """Yield the lines that checkpoint, each with its peer that does not, of which both peaks are known."""
    runs = ok_runs(view.lines)
    for run in runs:
        plain = peer(run, runs, checkpointing="none") if run["line"].checkpoints else None
        if plain and run["line"].ratio("peak_allocated_bytes", plain["line"]) is not None:
            yield run["line"], plain["line"]


def _saved(title: str, name: str, pairs: Sequence[tuple[Line, Line]]) -> Field:
    """Return the part of a column's bytes that checkpointing saves."""
    ratios = [line.ratio(name, plain) for line, plain in pairs]
    return numbers(title, [None if ratio is None else 1 - ratio for ratio in ratios], PERCENT, ".2f")


def _cost(line: Line, plain: Line) -> tuple[float | None, str]:
    """Return the relative increase of step time, if both speeds are ranked, and the mark of one that is not certain."""
    speeds, ratio = (line.speed, plain.speed), line.ratio("step_seconds", plain)
    if ratio is None or not all(speed.is_ranked or speed.is_simulated for speed in speeds):
        return None, ""
    return ratio - 1, UNSETTLED_MARK * (not line.speed.is_simulated and are_alike(*speeds))


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
    plot = {
        "concat": [{"layer": layers, "width": width, "height": left.height} for layers in panels],
        "columns": count,
        "spacing": _GAP,
        "usermeta": {"beside": beside + _VALUE},
    }
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
