"""Charts of speed: tokens per second by configuration and over ranks."""

from collections.abc import Mapping, Sequence

from harness.report.charts.bars import Bars, bars, endings, ordered, row_fields
from harness.report.charts.curves import Curves, curve_points
from harness.report.charts.marks import Field, Rows, axis, column, numbers, unseen
from harness.report.charts.series import by_world
from harness.report.document import Chart, VegaLite
from harness.report.labels import STEP_TITLES
from harness.report.lines import Line, finite_number
from harness.report.text import MILLISECONDS, ONE, PERCENT, format_numbers
from harness.report.view import View

_WIDE = 8  # if the most ranks over the fewest exceed this, both axes are logarithmic

TOKENS = "tokens per second"


def throughput(view: View) -> Chart | None:
    """Draw tokens per second of every line, the fastest first.

    Speeds of enough repeats are bars with the range of their runs. Others are hollow points, which rank nothing, and
    disturbed ones and those of ranks that shared cores are not drawn. Without ranked speeds there is no chart.
    """
    lines = ordered(view.lines, lambda line: -line.drawn_speed if line.drawn_speed else None)
    if not view.draws_speeds or not any(line.drawn_speed for line in lines):
        return None
    status = {"status": column("status", [line.state for line in lines], True)}
    plot = bars(view, lines, status | speed_fields(lines) | endings(lines, is_timed=True), axis(TOKENS))
    return plot.chart("throughput", "Tokens per second", "median", speed_marks(plot))


def speed_fields(lines: Sequence[Line]) -> dict[str, Field]:
    """Return median, range and number of runs of the speeds, and what stands behind their bars."""
    speeds = [line.speed if line.drawn_speed else None for line in lines]
    fields = {
        name: numbers(title, [getattr(speed, name, None) for speed in speeds], ONE, ",.2f")
        for name, title in (("median", TOKENS), ("low", "slowest run"), ("high", "fastest run"))
    }
    runs = [speed.runs if speed else None for speed in speeds]
    texts = zip(speeds, fields["median"].cells, strict=True)
    return fields | {
        "runs": Field("runs", runs, [str(count or "") for count in runs], "d"),
        "ranked": unseen([speed and speed.is_ranked for speed in speeds]),
        "total": unseen([speed and (speed.high if speed.is_ranked else speed.median) for speed in speeds]),
        "shown": unseen(
            [text if speed is None or speed.is_ranked else f"{text} (n = {speed.runs})" for speed, text in texts]
        ),
    }


def speed_marks(plot: Bars) -> list[VegaLite]:
    """Return the layers of speeds: bars with ranges of those that are ranked, hollow points of the others."""
    ends = [plot.mark("tick end", end, "bar", "datum.ranked") for end in ("low", "high")]
    return [
        plot.mark("bar", "median", "bar", "datum.ranked"),
        plot.mark("rule spread", "low", "bar", "datum.ranked", x2="high"),
        *ends,
        plot.mark("point hollow", "median", "bar", "!datum.ranked"),
    ]


def scaling(view: View) -> Chart | None:
    """Draw tokens per second over ranks, and linear scaling from the fewest ranks."""
    series = by_world(view.lines) if view.draws_speeds else []
    if not series:
        return None
    points = curve_points(series)
    ranks, speeds = (
        [line.number("world_size") or 0 for _, line in points],
        [line.drawn_speed or 0.0 for _, line in points],
    )
    per_rank = [_speed_per_rank(curve.points[0]) for curve, _ in points]
    ideals = [speed * count for speed, count in zip(per_rank, ranks, strict=True)]
    shares = [speed / ideal for speed, ideal in zip(speeds, ideals, strict=True)]
    ends = [share if curve.points[-1] is line else None for (curve, line), share in zip(points, shares, strict=True)]
    fields = {
        "x": Field("ranks", ranks, list(map(str, ranks)), ",d"),
        "y": numbers(TOKENS, speeds, ONE, ",.2f"),
        "ideal": numbers("linear scaling", ideals, ONE, ",.2f"),
        "efficiency": Field(
            "efficiency (%)", [100 * share for share in shares], format_numbers(shares, PERCENT), ".2f"
        ),
        "last": Field("", ends, format_numbers(ends, PERCENT)),
    }
    rows = Rows([curve for curve, _ in points], fields)
    counts = sorted(set(ranks))
    is_wide = counts[-1] / counts[0] > _WIDE
    across, up = (0.0, counts[-1] * 1.03), (0.0, max(*speeds, *ideals) * 1.05)
    if is_wide:
        across, up = (counts[0] / 1.1, counts[-1] * 1.1), (min(speeds) / 1.2, max(*speeds, *ideals) * 1.2)
    x, y = axis("number of ranks", across, is_wide, counts, "d"), axis(TOKENS, up, is_wide)
    curves = Curves(view, rows, x, y)
    linear = curves.mark("line linear", y="ideal", detail="label")
    name = "Tokens per second by number of ranks (dotted: linear scaling)"
    facts = {
        "counts": list(map(str, counts)),
        "is_ranked": all(line.speed.is_ranked for _, line in points),
        "lines": view.lines,
    }
    return curves.chart("scaling", name, "y", len(series), [linear], facts=facts)


def _speed_per_rank(line: Line) -> float:
    return (line.drawn_speed or 0.0) / (line.number("world_size") or 1)


_TOTAL = "step time"

_EXPOSED = "exposed_communication_seconds"

_EXACT = ("value", "ms", ",.4f")

# What is overlapped follows the parts of a step, so that exposed communication has its own color in both charts.
_OVERLAPPED = "overlapped with computing"


def step(view: View) -> Chart | None:
    """Draw the parts of the step time of every line's median repeat, the shortest step first."""
    lines = [line for line in view.lines if not line.ok or line.row.get("step_seconds") is not None]
    times = {line.label: [value or None for value in _seconds(line, *STEP_TITLES)] for line in lines}
    totals = {label: sum(filter(None, seconds)) or None for label, seconds in times.items()}
    if not view.draws_speeds or not any(totals.values()):
        return None
    lines = [line for line in lines if not line.is_timed or totals[line.label]]
    lines = ordered(lines, lambda line: totals[line.label])
    parts = STEP_TITLES.values()
    rows = [dict(zip((*parts, _TOTAL), (*times[line.label], totals[line.label]), strict=True)) for line in lines]
    fields = {"status": column("status", [line.state for line in lines], True)} | row_fields(rows, MILLISECONDS)
    ends = [row[_TOTAL] for row in rows]
    plot = _stacked(view, lines, fields, fields[_TOTAL].title, ends, ends)
    facts = {
        "parts": [part for part in parts if plot.rows.known(part)],
        "is_repeated": any(len(line.runs) > 1 for line in lines),
    }
    stack = plot.stack(list(parts), MILLISECONDS, _EXACT)
    return plot.chart("step", "Breakdown of step time", _TOTAL, [stack], facts=facts)


def exposed_communication(view: View) -> Chart | None:
    """Draw how long each line communicates in a step, in the open and while it computes; the most exposed come last."""
    lines = view.lines if view.draws_speeds else []
    timed = [line for line in lines if line.ok and line.row.get("step_seconds") is not None]
    ranks = [line for line in timed if (line.row.get("world_size") or 1) > 1]
    times = {line.label: _seconds(line, _EXPOSED, "overlapped_communication_seconds") for line in ranks}
    lines = [line for line in ranks if not line.is_timed or (line.row.get("pp") or 1) == 1 or any(times[line.label])]
    if not any(times[line.label][0] for line in lines):
        return None
    lines = ordered(lines, lambda line: times[line.label][0])
    exposed, overlapped = ([times[line.label][place] for line in lines] for place in (0, 1))
    fields = {
        STEP_TITLES[_EXPOSED]: numbers("exposed", exposed, MILLISECONDS),
        _OVERLAPPED: numbers(_OVERLAPPED, overlapped, MILLISECONDS),
    }
    ends = [
        None if first is None else first + (second or 0.0) for first, second in zip(exposed, overlapped, strict=True)
    ]
    title = "communication per step (ms; the figure is what is exposed)"
    plot = _stacked(view, lines, fields, title, ends, exposed)
    stack = plot.stack([*STEP_TITLES.values(), _OVERLAPPED], MILLISECONDS, _EXACT)
    facts = {"has_pipelines": len(lines) < len(ranks)}
    return plot.chart("exposed", "Exposed communication", STEP_TITLES[_EXPOSED], [stack], facts=facts)


def _seconds(line: Line, *names: str) -> list[float | None]:
    """Return times of a line's median repeat; the parts of a step add up within one run only."""
    row = line.median_run.row if line.is_timed else {}
    return [finite_number(row.get(name)) for name in names]


def _stacked(
    view: View,
    lines: Sequence[Line],
    fields: Mapping[str, Field],
    title: str,
    ends: Sequence[float | None],
    figures: Sequence[float | None],
) -> Bars:
    """Return stacked bars of times, with these figures in ms behind their ends."""
    behind = {
        "total": unseen(numbers("", ends, MILLISECONDS).values),
        "shown": unseen(format_numbers(figures, MILLISECONDS)),
    }
    return bars(view, lines, {**fields, **endings(lines, is_timed=True), **behind}, axis(title))
