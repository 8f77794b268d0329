"""Charts of what memory costs: peak memory against speed, and what checkpointing saves against its time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.report.charts import style
from harness.report.charts.bars import bars
from harness.report.charts.marks import Field, Rows, axis, bytes_field, column, draw, numbers, spanning, unseen, words
from harness.report.charts.points import Points
from harness.report.charts.speed import TOKENS, speed_fields
from harness.report.claim_peers import ok_runs, peer
from harness.report.comparability import group_by
from harness.report.comparison_columns import UNSETTLED_MARK
from harness.report.document import Chart, VegaLite
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
        "on": column("on the front", ["yes" if line.is_on_front else "" for line in lines]),
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
    facts = {"fronts": list(filter(None, fronts)), "shown": len(shown), "groups": len(groups)}
    front = {"front": [line.position for line in lines if line.is_on_front]}
    return draw(view, "trade", "Peak memory and speed", rows, "x", plot, facts, labels, params=front)


def _panel(view: View, rows: Rows, number: int, size: tuple[int, int]) -> tuple[VegaLite, list[Datum]]:
    """Return the plot of a group, with its front, points, ranges of speeds and labels; and the data of the labels."""
    points = [datum for datum in rows.data if datum["group"] == number]
    x = spanning(f"{TOKENS} (higher is better)", [point[at] for point in points for at in ("x", "low", "high")])
    y = spanning(rows.fields["y"].title.replace(")", ", lower is better)"), [point["y"] for point in points])
    plot = Points(view, rows, x, y)
    front = sorted((point for point in points if point["first"]), key=lambda point: point["x"])
    ranges = [[point | {"x": point[end]} for end in ("low", "high")] for point in points if point["ranked"]]
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
            plot.labels(f"labels{number}"),
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
