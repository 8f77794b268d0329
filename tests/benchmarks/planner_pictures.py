"""Pictures of predicted beside measured step times and peaks, a file for each source."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from harness.report.charts.style import FONT, FONT_SIZE, PALETTE, SHAPES
from tests.support.published import PublishedRow

Predicted = Mapping[str, tuple[Sequence[PublishedRow], Sequence[float]]]

SIDE = 380  # pixels of a picture's width and height

GIB = 2**30


def write_pictures(folder: Path, seconds: Predicted, peaks: Predicted) -> None:
    """Write an SVG file for each source of step times and of peaks."""
    for source, (rows, predicted) in seconds.items():
        measured = [row.measured["step_seconds"] for row in rows]
        _picture(source, "step time (s)", rows, measured, predicted).save(folder / f"{slug(source)}_step_time.svg")
    for source, (rows, predicted) in peaks.items():
        measured = [row.measured["peak_bytes"] / GIB for row in rows]
        sizes = [size / GIB for size in predicted]
        _picture(source, "peak memory (GiB)", rows, measured, sizes).save(folder / f"{slug(source)}_peak.svg")


def slug(source: str) -> str:
    """Return the name of a source's files."""
    return "_".join("".join(letter if letter.isalnum() else " " for letter in source.lower()).split())


def _picture(
    source: str, quantity: str, rows: Sequence[PublishedRow], measured: Sequence[float], predicted: Sequence[float]
) -> Any:
    """Return a chart of a point for each row, by the number of GPUs, with lines of equal values and a tenth apart."""
    points: list[dict[str, Any]] = [
        {"measured": m, "predicted": p, "gpus": f"{row.layout.world_size}"}
        for row, m, p in zip(rows, measured, predicted, strict=True)
    ]
    order = sorted({point["gpus"] for point in points}, key=int)
    low, high = min([*measured, *predicted]) * 0.8, max([*measured, *predicted]) * 1.25
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    dots = (
        alt.Chart(alt.InlineData(values=points))
        .mark_point(size=22, opacity=0.75)
        .encode(
            alt.X("measured:Q", title=f"measured {quantity}", scale=scale),
            alt.Y("predicted:Q", title=f"predicted {quantity}", scale=scale),
            alt.Color("gpus:N", title="GPUs", sort=order, scale=alt.Scale(domain=order, range=list(PALETTE))),
            alt.Shape("gpus:N", title="GPUs", sort=order, scale=alt.Scale(domain=order, range=list(SHAPES))),
        )
    )
    lines = [
        {"measured": end, "predicted": end * factor, "apart": name}
        for name, factor in (("equal", 1.0), ("10 % more", 1.1), ("10 % less", 1 / 1.1))
        for end in (low, high)
    ]
    guides = (
        alt.Chart(alt.InlineData(values=lines))
        .mark_line(color="#777777", strokeWidth=1, clip=True)
        .encode(
            alt.X("measured:Q"),
            alt.Y("predicted:Q"),
            alt.StrokeDash(
                "apart:N",
                legend=None,
                scale=alt.Scale(domain=["equal", "10 % more", "10 % less"], range=[[1, 0], [4, 3], [4, 3]]),
            ),
            alt.Detail("apart:N"),
        )
    )
    chart = (guides + dots).properties(title=f"{source}: {len(rows)} rows", width=SIDE, height=SIDE)
    return chart.configure(font=FONT, background="white").configure_axis(
        labelFontSize=FONT_SIZE, titleFontSize=FONT_SIZE
    )
