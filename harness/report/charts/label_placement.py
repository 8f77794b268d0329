"""Where labels of points go so that they lie neither over each other nor over points: greedy, in pixels."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from harness.report.charts import style

_LETTER, _LINE, _POINT = 0.54 * (style.FONT_SIZE - 1), style.FONT_SIZE + 1, 5.0  # pixels; a letter's mean width

_STEPS = 80  # of a line's piece

LONGEST = 30  # letters of a label beside its point

Point = tuple[float, float]

Box = tuple[float, float, float, float]  # left, top, right, bottom

# By name: which of the text's ends is at the point, and how far from it the text begins, to the right and down.
PLACES = {
    "right": ("left", 8, 0),
    "left": ("right", -8, 0),
    "above": ("center", 0, -12),
    "below": ("center", 0, 12),
    "below right": ("left", 2, 12),
    "below left": ("right", -2, 12),
    "above right": ("left", 2, -12),
    "above left": ("right", -2, -12),
}


def placed(
    points: Sequence[Point],
    texts: Sequence[str],
    first: Sequence[bool],
    lines: Sequence[Sequence[Point]],
    beside: int = 0,
) -> list[str]:
    """Of each point the place of its label, "" where there is no room; those of `first` get theirs first, and always.

    points, and the corners of lines that labels leave free: as shares of the plot's width, from the left, and of its
    height, from the top. beside: pixels of the picture's width that a legend takes.
    """
    width, height = style.WIDTH - 70 - beside, style.HEIGHT
    at = [(x * width, y * height) for x, y in points]
    taken = [_around(x, y, _POINT) for x, y in at]
    taken += [_around(x * width, y * height, 1.0) for line in lines for x, y in _along(line)]
    found = [""] * len(at)
    for position in sorted(range(len(at)), key=lambda position: not first[position]):
        for place in PLACES:
            box = _box(place, *at[position], len(shortened(texts[position])) * _LETTER)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height
            if inside and not any(_meet(box, other) for other in taken):
                found[position] = place
                taken.append(box)
                break
        else:
            found[position] = "right" if first[position] else ""
    return found


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _around(x: float, y: float, by: float) -> Box:
    return x - by, y - by, x + by, y + by


def _along(line: Sequence[Point]) -> Iterator[Point]:
    """Points on a line, a few pixels from each other."""
    for (x, y), (to_x, to_y) in pairwise(line):
        for at in range(_STEPS + 1):
            yield x + (to_x - x) * at / _STEPS, y + (to_y - y) * at / _STEPS


def _box(place: str, x: float, y: float, long: float) -> Box:
    align, across, down = PLACES[place]
    left = x + across - {"left": 0.0, "center": long / 2, "right": long}[align]
    return left, y + down - _LINE / 2, left + long, y + down + _LINE / 2


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
