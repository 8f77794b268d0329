"""Points of two quantities, with labels beside them where there is space: neither on each other nor on points."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from harness.report.charts import marks, style
from harness.report.charts.marks import Plot
from harness.report.document import VegaLite
from harness.report.lines import Datum

_LETTER, _LINE, _POINT = 0.54 * (style.FONT_SIZE - 1), style.FONT_SIZE + 1, 5.0  # pixels; a character's mean width

_STEPS = 80  # points on each segment of a line

LONGEST = 40  # characters of a label


Point = tuple[float, float]

Box = tuple[float, float, float, float]  # left, top, right, bottom

# The alignment of the text and its offset from the point, to the right and down, by name.
SIDES: dict[str, tuple[str, int, int]] = {
    "right": ("left", 8, 0),
    "left": ("right", -8, 0),
    "above": ("center", 0, -12),
    "below": ("center", 0, 12),
    "below right": ("left", 2, 12),
    "below left": ("right", -2, 12),
    "above right": ("left", 2, -12),
    "above left": ("right", -2, -12),
}


def place_labels(
    points: Sequence[Point],
    texts: Sequence[str],
    has_priority: Sequence[bool],
    lines: Sequence[Sequence[Point]],
    size: tuple[float, float],
) -> list[str]:
    """Return the side of each point on which its label goes, or "" if there is no space or no text.

    Args:
        points: Positions as shares of the plot's width from the left, and of its height from the top.
        texts: The labels.
        has_priority: Whether a label is placed before the others.
        lines: The corners of lines that labels must not cover, in the coordinates of points.
        size: Width and height of the plot in pixels.
    """
    width, height = size
    centers = [(x * width, y * height) for x, y in points]
    occupied = [_square(x, y, _POINT) for x, y in centers]
    occupied += [_square(x * width, y * height, 1.0) for line in lines for x, y in _points_on(line)]
    sides = [""] * len(centers)
    for position in sorted(range(len(centers)), key=lambda position: not has_priority[position]):
        if not texts[position]:
            continue
        for side in SIDES:
            box = _box(side, *centers[position], len(shortened(texts[position])) * _LETTER)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height
            if inside and not any(_overlap(box, other) for other in occupied):
                sides[position] = side
                occupied.append(box)
                break
    return sides


def shortened(text: str) -> str:
    """Return a label cut to its longest length."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _square(x: float, y: float, half: float) -> Box:
    return x - half, y - half, x + half, y + half


def _points_on(line: Sequence[Point]) -> Iterator[Point]:
    """Yield points on a line, a few pixels from each other."""
    for (x, y), (to_x, to_y) in pairwise(line):
        for step in range(_STEPS + 1):
            yield x + (to_x - x) * step / _STEPS, y + (to_y - y) * step / _STEPS


def _box(side: str, x: float, y: float, length: float) -> Box:
    align, right, down = SIDES[side]
    left = x + right - {"left": 0.0, "center": length / 2, "right": length}[align]
    return left, y + down - _LINE / 2, left + length, y + down + _LINE / 2


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


class Points(Plot):
    """Points of the fields x and y, of which `name` is the label, and those with `first` have theirs first."""

    def labels(self, name: str) -> VegaLite:
        """Return the layer of labels with this name of their data."""
        return marks.layer("text beside", name, x=self.x.channel("x"), y=self.y.channel("y"), text="short")

    def placed(
        self,
        points: Sequence[Datum],
        lines: Sequence[Sequence[Datum]],
        size: tuple[int, int] = (style.WIDTH - 70, style.HEIGHT),
    ) -> list[Datum]:
        """Return the data of the labels that have space.

        Args:
            points: The data of the points.
            lines: The corners of lines that labels must not cover.
            size: Width and height of the plot in pixels.
        """

        def relative(datum: Datum) -> Point:
            return self.x.share(datum["x"]), 1 - self.y.share(datum["y"])

        texts, first = [point["name"] for point in points], [point.get("first", False) for point in points]
        corners = [[relative(corner) for corner in line] for line in lines]
        sides = place_labels([relative(point) for point in points], texts, first, corners, size)
        return [
            point | dict(zip(("align", "dx", "dy"), SIDES[side], strict=True)) | {"short": shortened(text)}
            for point, text, side in zip(points, texts, sides, strict=True)
            if side
        ]
