"""Curves, lines of a report that differ in one quantity alone, and points of two quantities, with their labels.

A curve has its name at its end; where there are many, each strategy has a small chart. Labels of points stand where
there is space: neither on each other nor on points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, pairwise
from typing import Any, TypeVar

import numpy as np

from harness.config.strategy import DEGREES
from harness.report.charts import style
from harness.report.charts.bars import MOST
from harness.report.charts.marks import Plot, draw, palette, share, single
from harness.report.charts.rows import unseen
from harness.report.comparability import curve_columns, curve_key, group_by
from harness.report.document import Chart, VegaLite
from harness.report.labels import OTHER_OPTIONS, VARYING, labels
from harness.report.lines import Datum, Item, Line


@dataclass(frozen=True)
class Series(Item):
    """The lines that are the points of one curve, in the order of the quantity in which they differ.

    No two series of a chart have the same label.
    """

    points: Sequence[Line]

    @property
    def is_simulated(self) -> bool:
        """Whether its points were simulated, which they all were or were not."""
        return self.points[0].is_simulated

    @property
    def drawn_speed(self) -> float | None:
        """The speed of the fastest point, None where none is known."""
        return max((line.drawn_speed for line in self.points if line.drawn_speed is not None), default=None)


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


# The columns that follow from the number of ranks.
_DEGREES = ("world_size", *DEGREES, "layers_per_stage")

BATCH_COLUMNS = ("micro_batch", "global_batch")

_SIZES = (
    *("parameters", "model", "layers_per_stage", "name", "source", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)


def by_world(lines: Sequence[Line]) -> list[Series]:
    """Return the curves of speed over ranks, with equal batches if there are such lines, else with any batches."""
    ok = [line for line in lines if line.drawn_speed and line.number("world_size")]
    if not (any_batches := _group(ok, "world_size", (*_DEGREES, *BATCH_COLUMNS))):
        return []  # what is alone with any batch is so with equal ones
    attempts = (_group(ok, "world_size", (*_DEGREES, *free)) for free in ((), BATCH_COLUMNS[:1], BATCH_COLUMNS[1:]))
    return next(filter(None, attempts), any_batches)


def by_micro_batch(lines: Sequence[Line]) -> list[Series]:
    """Return the curves of activation memory over the micro-batch."""
    ok = [line for line in lines if line.ok and line.number("activation_bytes") and line.number("micro_batch")]
    return _group(ok, "micro_batch", BATCH_COLUMNS)


def by_parameters(lines: Sequence[Line]) -> list[Series]:
    """Return the curves of peak memory over the model's size; lines that ran out of memory are points too."""
    known = [line for line in lines if line.status in ("ok", "oom") and line.number("parameters")]
    return _group(known, "parameters", _SIZES)


def _group(lines: Sequence[Line], name: str, free: tuple[str, ...]) -> list[Series]:
    """Return the series over a column with more than one point; the first of several lines at a point counts."""
    settings = group_by(lines, lambda line: tuple(map(line.row.get, curve_columns(free)))).values()
    varied = {line for members in settings if len({line.number(name) for line in members}) > 1 for line in members}
    known = [line for line in lines if line in varied]  # others are alone, whatever their options are
    groups = group_by(known, lambda line: curve_key(line.row, line.record.config, free)).values()
    by_value = [{line.number(name) or 0.0: line for line in reversed(members)} for members in groups]
    curves = [[points[value] for value in sorted(points)] for points in by_value if len(points) > 1]
    rows = [points[0].row | {"run_id": f"({number})", OTHER_OPTIONS: ""} for number, points in enumerate(curves, 1)]
    names = labels(rows, [column for column in VARYING if column not in free])
    return [
        Series(label, points[0].strategy, position, points)
        for position, (label, points) in enumerate(zip(names, curves, strict=True))
    ]


_MEAN, _LINE, _POINT = 0.54 * (style.FONT_SIZE - 1), style.FONT_SIZE + 1, 5.0  # pixels; a character's mean width

_STEPS = 81  # points on each segment of a line

_LONGEST = 40  # characters of a label

# Where a label may be: the alignment of its text, its offset from the point, to the right and down, and where the
# text's middle is from there, in halves of its width.
_SIDES = (
    *(("left", 8, 0, 1), ("right", -8, 0, -1), ("center", 0, -12, 0), ("center", 0, 12, 0)),
    *(("left", 2, 12, 1), ("right", -2, 12, -1), ("left", 2, -12, 1), ("right", -2, -12, -1)),
)

# Where there is no space beside the point: farther away, the nearest first, at the end of a line from the point.
_FAR = tuple(
    ("left" if x > 0 else "right", round(distance * x), round(distance * y), 1 if x > 0 else -1)
    for distance in range(24, 170, 12)
    for turn in map(math.radians, (-60, 60, -30, 30, -80, 80, 0))
    for x, y in ((math.cos(turn), math.sin(turn)), (-math.cos(turn), math.sin(turn)))
)


_Box = tuple[float, float, float, float]  # what is occupied: the middle, and the distance of the edges from it


def shortened(text: str) -> str:
    """Return a label cut to its longest length."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


class Points(Plot):
    """Points of the fields x and y, of which `name` is the label, and those with `first` have theirs first."""

    def labels(self, name: str) -> list[VegaLite]:
        """Return the layers of labels with this name of their data, and of lines to those that are far away."""
        line = self.mark("rule leader", data=name, test="datum.far", x2="x", y2="y")
        line["mark"] |= {"xOffset": {"expr": "datum.dx"}, "yOffset": {"expr": "datum.dy"}}
        return [line, self.mark("text beside", data=name, text="short")]

    def placed(
        self,
        points: Sequence[Datum],
        lines: Sequence[Sequence[Datum]],
        size: tuple[int, int] = (style.WIDTH - 70, style.HEIGHT),
    ) -> list[Datum]:
        """Return the data of the labels, each where there is space for it; one that no place is left for has none.

        Args:
            points: The data of the points.
            lines: The corners of lines that labels must not cover.
            size: Width and height of the plot in pixels.
        """

        def pixels(datum: Datum) -> tuple[float, float]:
            return share(self.x, datum["x"]) * size[0], (1 - share(self.y, datum["y"])) * size[1]

        def is_free(box: _Box) -> bool:
            middle, level, half, tall = box
            is_inside = half <= middle <= size[0] - half and tall <= level <= size[1] - tall
            return is_inside and all(
                abs(middle - at) >= half + w or abs(level - to) >= tall + h for at, to, w, h in occupied
            )

        occupied = [(*pixels(point), _POINT, _POINT) for point in points]
        occupied += [box for line in lines for ends in pairwise(map(pixels, line)) for box in _boxes(*ends)]
        labels: dict[int, Datum] = {}
        for place, point in sorted(enumerate(points), key=lambda entry: not entry[1].get("first")):
            text, (x, y) = shortened(point["name"]), pixels(point)
            half, tall = len(text) * _MEAN / 2, _LINE / 2
            for align, right, down, halves in _SIDES + _FAR if text else ():
                box = (x + right + halves * half, y + down, half, tall)
                if is_free(box):
                    is_far = (align, right, down, halves) in _FAR
                    occupied += [box, *_boxes((x, y), (x + right, y + down))[:: 1 if is_far else _STEPS]]
                    labels[place] = point | {"align": align, "dx": right, "dy": down, "short": text, "far": is_far}
                    break
        return [labels[place] for place in sorted(labels)]


def _boxes(start: tuple[float, float], end: tuple[float, float]) -> list[_Box]:
    """Return the boxes that a line occupies."""
    return [(x, y, 1.0, 1.0) for x, y in np.linspace(start, end, _STEPS)]
