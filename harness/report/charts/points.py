"""Points of two quantities, with labels beside them where there is space: neither on each other nor on points."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from harness.report.charts import style
from harness.report.charts.marks import Plot, share
from harness.report.document import VegaLite
from harness.report.lines import Datum

_LETTER, _LINE, _POINT = 0.54 * (style.FONT_SIZE - 1), style.FONT_SIZE + 1, 5.0  # pixels; a character's mean width

_STEPS = 81  # points on each segment of a line

_LONGEST = 40  # characters of a label

# Where a label may be: the alignment of its text, its offset from the point, to the right and down, and where the
# text's middle is from there, in halves of its width.
_SIDES = (
    *(("left", 8, 0, 1), ("right", -8, 0, -1), ("center", 0, -12, 0), ("center", 0, 12, 0)),
    *(("left", 2, 12, 1), ("right", -2, 12, -1), ("left", 2, -12, 1), ("right", -2, -12, -1)),
)


def shortened(text: str) -> str:
    """Return a label cut to its longest length."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


class Points(Plot):
    """Points of the fields x and y, of which `name` is the label, and those with `first` have theirs first."""

    def labels(self, name: str) -> VegaLite:
        """Return the layer of labels with this name of their data."""
        return self.mark("text beside", data=name, text="short")

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

        def pixels(datum: Datum) -> tuple[float, float]:
            return share(self.x, datum["x"]) * size[0], (1 - share(self.y, datum["y"])) * size[1]

        # The boxes that are occupied: the middle, and the distance of the edges from it.
        occupied = [(*pixels(point), _POINT, _POINT) for point in points]
        segments = [ends for line in lines for ends in pairwise(map(pixels, line))]
        occupied += [(x, y, 1.0, 1.0) for ends in segments for x, y in np.linspace(*ends, _STEPS)]
        labels: dict[int, Datum] = {}
        for place, point in sorted(enumerate(points), key=lambda entry: not entry[1].get("first")):
            text, (x, y) = shortened(point["name"]), pixels(point)
            half, tall = len(text) * _LETTER / 2, _LINE / 2
            for align, right, down, halves in _SIDES if text else ():
                middle, level = x + right + halves * half, y + down
                is_inside = half <= middle <= size[0] - half and tall <= level <= size[1] - tall
                is_free = all(abs(middle - at) >= half + w or abs(level - to) >= tall + h for at, to, w, h in occupied)
                if is_inside and is_free:
                    occupied.append((middle, level, half, tall))
                    labels[place] = point | {"align": align, "dx": right, "dy": down, "short": text}
                    break
        return [labels[place] for place in sorted(labels)]
