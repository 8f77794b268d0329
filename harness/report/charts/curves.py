"""Curves with their names at their ends, and where there are many, a small chart for each strategy."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from typing import Any, TypeVar

from harness.report.charts import style
from harness.report.charts.bars import MOST
from harness.report.charts.marks import Plot, draw, palette, share, single, unseen
from harness.report.charts.points import shortened
from harness.report.charts.series import Series
from harness.report.comparability import group_by
from harness.report.document import Chart, VegaLite
from harness.report.lines import Item, Line

ONE_OF_EACH = "one of every strategy, then the others in the order of the report"  # what `select` returns

_FEW = 6  # curves that one chart can show

AnyItem = TypeVar("AnyItem", bound=Item)

_COLUMNS, _CELL_HEIGHT, _BESIDE = 2, 150, 20  # small charts beside each other; pixels of one, and beside one

_MOST_ROOM = 74  # pixels of names at the right of small charts

_LETTER = 6.2  # pixels of a label's character


def curve_points(series: Sequence[Series]) -> list[tuple[Series, Line]]:
    """Return the points of the curves that `select` chooses, each with its curve."""
    return [(curve, line) for curve in select(series) for line in curve.points]


class Curves(Plot):
    """Curves in the colors of their strategies, each named at its end. Their rows are their points, in the order of x.

    Data of the strategy "" are drawn in every small chart.
    """

    def chart(
        self,
        name: str,
        title: str,
        measure: str,
        total: int,
        behind: Sequence[VegaLite] = (),
        above: Sequence[VegaLite] = (),
        **more: Any,
    ) -> Chart:
        """Return the chart of the curves, with layers behind them and above them.

        All else is as `draw` has it.
        """
        labels = [item.label for item in self.rows.items]
        curves = {item.label: item for item in self.rows.items}
        groups = list(group_by(curves, lambda label: curves[label].strategy).values())
        variants = {label: rank for group in groups for rank, label in enumerate(group)}
        is_one = len(curves) <= _FEW
        names = {label: shortened(label) if is_one else _variant(curve) for label, curve in curves.items()}
        named = [[label for label in panel if names[label]] for panel in ([curves] if is_one else groups)]
        height = style.HEIGHT if is_one else _CELL_HEIGHT
        ends = {row: top for panel in named for row, top in self._ends(panel, height).items()}
        fields = {
            "variant": unseen([variants[label] for label in labels]),
            "end": unseen([ends.get(row) for row in range(len(labels))]),
            "short": unseen([names[label] or None for label in labels]),
        }
        ranks = range(max(map(len, groups)))
        dash, shape = (palette("variant", dict(zip(ranks, cycle(looks)))) for looks in (style.DASHES, style.SHAPES))
        layers = [
            *behind,
            self.mark("line curve", detail="label", strokeDash=dash),
            self.mark("point", shape=shape),
            *above,
            self.mark(
                "text value",
                y={"field": "end", "type": "quantitative", "scale": None},
                test="isValid(datum.end)",
                text="short",
            ),
        ]
        room = min(style.WIDTH if is_one else _MOST_ROOM, round(_LETTER * max(map(len, names.values()))))
        plot = single(layers) if is_one else _small_charts(layers, room)
        rows = replace(self.rows, fields={**self.rows.fields, **fields})
        return draw(self.view, name, title, rows, measure, plot, right=room + 4, rule=ONE_OF_EACH, total=total, **more)

    def _ends(self, labels: Sequence[str], height: float) -> dict[int, float]:
        """Return how far from the top the names of curves are, by their last rows, moved apart where they overlap."""
        points = enumerate(self.rows.data)
        last = {at["label"]: (height * (1 - share(self.y, at["y"])), row) for row, at in points if "y" in at}
        ordered = sorted(last[label] for label in labels if label in last)
        tops = list(accumulate((top for top, _ in ordered), lambda above, top: max(top, above + style.LINE)))
        overflow = max(0.0, max(tops, default=0.0) - height)
        return {row: top - overflow for (_, row), top in zip(ordered, tops, strict=True)}


def _small_charts(layers: Sequence[VegaLite], room: int) -> VegaLite:
    """Return a plot of these layers for each strategy, with so many pixels at its right for names."""
    width = style.plot_width(style.WIDTH, _COLUMNS, room + _BESIDE)
    return {
        "facet": {"field": "strategy", "title": None, "sort": None},
        "columns": _COLUMNS,
        "spacing": {"column": room},
        "spec": {"layer": list(layers), "width": width, "height": _CELL_HEIGHT},
        "usermeta": {"beside": room + _BESIDE},
    }


def _variant(curve: Item) -> str:
    """Return what a curve is beside its strategy, such as "full" for full checkpointing."""
    return curve.label.removeprefix(curve.strategy).strip().removeprefix("+ ").replace(" checkpointing", "")


def select(candidates: Sequence[AnyItem], most: int = MOST) -> list[AnyItem]:
    """Return at most so many of the candidates, in their order: the fastest of every strategy before the others."""
    by_speed = sorted(candidates, key=lambda item: -(item.drawn_speed or 0.0))
    fastest = {item.strategy: item for item in reversed(by_speed)}
    drawn = sorted(candidates, key=lambda item: fastest[item.strategy] is not item)[:most]
    return sorted(drawn, key=lambda item: item.position)
