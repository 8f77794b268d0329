"""Curves with their names at their ends, and where there are many, a small chart for each strategy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from harness.report.charts import marks, style
from harness.report.charts.bars import MOST
from harness.report.charts.marks import Plot, unseen
from harness.report.charts.points import shortened
from harness.report.charts.series import Series
from harness.report.charts.setting import setting_lines
from harness.report.comparability import group_by
from harness.report.document import Chart, VegaLite
from harness.report.lines import Datum, Item, Line
from harness.report.sentences import sentence

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
        data: Mapping[str, Sequence[Datum]] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Chart:
        """Return the chart of the curves, as `marks.draw` does.

        Args:
            name: The name of the chart's file.
            title: The title of the chart.
            measure: The field whose range the page states.
            total: How many curves there are.
            behind: Layers behind the curves.
            above: Layers in front of the curves.
            data: More data by their names.
            facts: What the sentence of this chart says beside what its rows show.
        """
        curves = {item.label: item for item in self.rows.items}
        omitted = sentence("chart_omitted", drawn=len(curves), total=total, rule=ONE_OF_EACH)
        groups = group_by(curves.values(), lambda curve: curve.strategy)
        variants = {curve.label: rank for group in groups.values() for rank, curve in enumerate(group)}
        if len(curves) <= _FEW:
            names = {label: shortened(label) for label in curves}
            ends = self._ends(list(curves), style.HEIGHT)
        else:
            names = {label: _variant(curve) for label, curve in curves.items()}
            ends = {}
            for group in groups.values():
                ends |= self._ends([curve.label for curve in group if names[curve.label]], _CELL_HEIGHT)
        labels = [item.label for item in self.rows.items]
        fields = {
            "variant": unseen([variants[label] for label in labels]),
            "end": unseen([ends.get(place) for place in range(len(labels))]),
            "short": unseen([names[label] or None for label in labels]),
        }
        rows = replace(self.rows, fields={**self.rows.fields, **fields})
        ranks = sorted(set(variants.values()))
        dash, shape = (_by_variant(ranks, choices) for choices in (style.DASHES, style.SHAPES))
        end = {"field": "end", "type": "quantitative", "scale": None}
        layers = [
            *behind,
            self.mark("line curve", detail="label", strokeDash=dash),
            self.mark("point", shape=shape),
            *above,
            self.mark("text value", y=end, test="isValid(datum.end)", text="short"),
        ]
        room = round(_LETTER * max(map(len, names.values())))
        plot = marks.single(layers)
        if len(curves) > _FEW:
            room = min(_MOST_ROOM, room)
            plot = _small_charts(layers, room)
        setting = setting_lines(self.view)
        return marks.draw(name, title, setting, rows, measure, plot, facts, data, room + 4, omitted=omitted)

    def _ends(self, labels: Sequence[str], height: float) -> dict[int, float]:
        """Return how far from the top the names of curves are, by their last rows, moved apart where they overlap."""
        heights = enumerate(self.rows.fields["y"].values)
        last = {
            self.rows.items[row].label: (height * (1 - self.y.share(y)), row) for row, y in heights if y is not None
        }
        placed: dict[int, float] = {}
        lowest = -math.inf
        for top, row in sorted(last[label] for label in labels if label in last):
            lowest = placed[row] = max(top, lowest + style.LINE)
        overflow = max(0.0, lowest - height)
        return {row: top - overflow for row, top in placed.items()}


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


def _by_variant(ranks: Sequence[int], looks: Sequence[Any]) -> VegaLite:
    """Return the channel by which curves of one strategy differ."""
    scale = {"domain": list(ranks), "range": [looks[rank % len(looks)] for rank in ranks]}
    return {"field": "variant", "type": "nominal", "scale": scale, "legend": None}


def _variant(curve: Item) -> str:
    """Return what a curve is beside its strategy, such as "full" for full checkpointing."""
    return curve.label.removeprefix(curve.strategy).strip().removeprefix("+ ").replace(" checkpointing", "")


def select(candidates: Sequence[AnyItem], most: int = MOST) -> list[AnyItem]:
    """Return at most so many of the candidates, in their order: the fastest of every strategy before the others."""
    by_speed = sorted(
        (item for item in candidates if item.drawn_speed is not None), key=lambda item: -(item.drawn_speed or 0.0)
    )
    fastest = {item.strategy: item for item in reversed(by_speed)}
    first = [item for item in by_speed if fastest[item.strategy] is item]
    others = [item for item in candidates if fastest.get(item.strategy) is not item]
    drawn = {item.position for item in [*first, *others][:most]}
    return [item for item in candidates if item.position in drawn]
