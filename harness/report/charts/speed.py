"""Charts of speed: tokens per second by configuration and over ranks."""

from collections.abc import Sequence

from harness.report.charts.bars import Bars, bars, endings, ordered, row_fields
from harness.report.charts.curves import Curves, by_world, curve_points
from harness.report.charts.marks import axis
from harness.report.charts.rows import Field, Rows, column, figures, numbers, unseen
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
    fields = {"status": column("status", [line.state for line in lines], True), **speed_fields(lines)}
    plot = bars(view, lines, fields | endings(lines, is_timed=True), axis(TOKENS))
    return plot.chart("throughput", "Tokens per second", "median", speed_marks(plot))


def speed_fields(lines: Sequence[Line]) -> dict[str, Field]:
    """Return median, range and number of runs of the speeds, and what stands behind their bars."""
    speeds = [line.speed if line.drawn_speed else None for line in lines]
    fields = {
        name: numbers(title, [getattr(speed, name, None) for speed in speeds], ONE, ",.2f")
        for name, title in (("median", TOKENS), ("low", "slowest run"), ("high", "fastest run"))
    }
    texts = zip(speeds, fields["median"].cells, strict=True)
    return fields | {
        "runs": figures("runs", [speed.runs if speed else None for speed in speeds], "d"),
        "ranked": unseen([speed and speed.is_ranked for speed in speeds]),
        "total": unseen([speed and (speed.high if speed.is_ranked else speed.median) for speed in speeds]),
        "shown": unseen(
            [text if speed is None or speed.is_ranked else f"{text} (n = {speed.runs})" for speed, text in texts]
        ),
    }


def speed_marks(plot: Bars) -> list[VegaLite]:
    """Return the layers of speeds: bars with ranges of those that are ranked, hollow points of the others."""
    return [
        plot.mark("bar", "median", "bar", "datum.ranked"),
        plot.mark("rule spread", "low", "bar", "datum.ranked", x2="high"),
        *(plot.mark("tick end", end, "bar", "datum.ranked") for end in ("low", "high")),
        plot.mark("point hollow", "median", "bar", "!datum.ranked"),
    ]


def scaling(view: View) -> Chart | None:
    """Draw tokens per second over ranks, and linear scaling from the fewest ranks."""
    series = by_world(view.lines) if view.draws_speeds else []
    if not series:
        return None
    curves, lines = zip(*curve_points(series), strict=True)
    ranks, speeds = [line.row["world_size"] for line in lines], [line.speed.median for line in lines]
    firsts, lasts = ([curve.points[end] for curve in curves] for end in (0, -1))
    ideals = [line.speed.median / line.row["world_size"] * count for line, count in zip(firsts, ranks, strict=True)]
    shares = [speed / ideal for speed, ideal in zip(speeds, ideals, strict=True)]
    ends = [share if line is last else None for line, last, share in zip(lines, lasts, shares, strict=True)]
    fields = {
        "x": Field("ranks", ranks, list(map(str, ranks)), ",d"),
        "y": numbers(TOKENS, speeds, ONE, ",.2f"),
        "ideal": numbers("linear scaling", ideals, ONE, ",.2f"),
        "efficiency": numbers("efficiency (%)", shares, PERCENT, ".2f"),
        "last": Field("", ends, format_numbers(ends, PERCENT)),
    }
    counts, highest = sorted(set(ranks)), max(*speeds, *ideals)
    is_wide = counts[-1] / counts[0] > _WIDE
    across = (counts[0] / 1.1, counts[-1] * 1.1) if is_wide else (0.0, counts[-1] * 1.03)
    up = (min(speeds) / 1.2, highest * 1.2) if is_wide else (0.0, highest * 1.05)
    x, y = axis("number of ranks", across, is_wide, values=counts, format="d"), axis(TOKENS, up, is_wide)
    plot = Curves(view, Rows(curves, fields), x, y)
    return plot.chart(
        "scaling",
        "Tokens per second by number of ranks (dotted: linear scaling)",
        "y",
        len(series),
        [plot.mark("line linear", y="ideal", detail="label")],
        facts={
            "counts": list(map(str, counts)),
            "is_ranked": all(line.speed.is_ranked for line in lines),
            "lines": view.lines,
        },
    )


_TOTAL = "step time"

_COMMUNICATION = ("exposed_communication_seconds", "overlapped_communication_seconds")

_EXACT = ("value", "ms", ",.4f")


def step(view: View) -> Chart | None:
    """Draw the parts of the step time of every line's median repeat, the shortest step first."""
    known = [line for line in view.lines if not line.is_timed or _step_parts(line)[_TOTAL]]
    lines = ordered(known, lambda line: _step_parts(line)[_TOTAL])
    rows = [_step_parts(line) for line in lines]
    totals = [row[_TOTAL] for row in rows]
    if not view.draws_speeds or not any(totals):
        return None
    parts = row_fields(rows, MILLISECONDS)
    fields = {
        "status": column("status", [line.state for line in lines], True),
        **parts,
        **endings(lines, is_timed=True),
        "total": unseen(parts[_TOTAL].values),
        "shown": unseen(format_numbers(totals, MILLISECONDS)),
    }
    plot = bars(view, lines, fields, axis(parts[_TOTAL].title))
    facts = {
        "parts": [part for part in STEP_TITLES.values() if plot.rows.known(part)],
        "is_repeated": any(len(line.runs) > 1 for line in lines),
    }
    stack = plot.stack(list(STEP_TITLES.values()), MILLISECONDS, _EXACT)
    return plot.chart("step", "Breakdown of step time", _TOTAL, [stack], facts=facts)


def _step_parts(line: Line) -> dict[str, float | None]:
    """Return the parts of a step by their titles, and their sum, None where there is none."""
    parts = {title: _seconds(line, name) or None for name, title in STEP_TITLES.items()}
    return parts | {_TOTAL: sum(filter(None, parts.values())) or None}


def exposed_communication(view: View) -> Chart | None:
    """Draw how long each line communicates in a step, in the open and while it computes; the most exposed come last."""
    timed = [line for line in view.lines if line.ok and line.row.get("step_seconds") is not None]
    ranks = [line for line in timed if (line.row.get("world_size") or 1) > 1]
    known = [
        line
        for line in ranks
        if line.untimed or (line.row.get("pp") or 1) == 1 or any(_seconds(line, name) for name in _COMMUNICATION)
    ]
    lines = ordered(known, lambda line: _seconds(line, _COMMUNICATION[0]))
    exposed, overlapped = ([_seconds(line, name) for line in lines] for name in _COMMUNICATION)
    if not view.draws_speeds or not any(exposed):
        return None
    ends = [first if first is None else first + (more or 0.0) for first, more in zip(exposed, overlapped, strict=True)]
    title, behind = STEP_TITLES[_COMMUNICATION[0]], "overlapped with computing"
    fields = {
        title: numbers("exposed", exposed, MILLISECONDS),
        behind: numbers(behind, overlapped, MILLISECONDS),
        **endings(lines, is_timed=True),
        "total": unseen(numbers("", ends, MILLISECONDS).values),
        "shown": unseen(format_numbers(exposed, MILLISECONDS)),
    }
    plot = bars(view, lines, fields, axis("communication per step (ms; the figure is what is exposed)"))
    # What is overlapped follows the parts of a step, so that exposed communication has its own color in both charts.
    stack = plot.stack([*STEP_TITLES.values(), behind], MILLISECONDS, _EXACT)
    return plot.chart(
        "exposed",
        "Exposed communication",
        title,
        [stack],
        facts={"has_pipelines": len(lines) < len(ranks), "is_repeated": any(len(line.runs) > 1 for line in lines)},
    )


def _seconds(line: Line, name: str) -> float | None:
    """Return a time of a step of the median repeat, as parts add up within one run only; a virtual run has no step."""
    has_step = line.is_timed and line.row.get("step_seconds") is not None
    return finite_number(line.median_run.row.get(name)) if has_step else None
