"""Colors, sizes and Vega-Lite's configs for light and dark pages; and altair, imported when it is first used.

A spec names styles and contains no config.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt
else:

    class _LazyAltair:
        """A stand-in for altair, whose import takes a third of a second that commands without charts need not wait."""

        def __getattr__(self, name: str) -> Any:
            import altair

            return getattr(altair, name)

    alt = _LazyAltair()

__all__ = ["alt"]

WIDTH, HEIGHT = 620, 340  # pixels, of a whole picture with its axes, and of the plot where its lines are no bars

STEP, NARROW_STEP = 22, 16  # pixels a bar, and a bar where there are many

MANY = 12  # bars

LABEL_LIMIT = 220  # pixels

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # all of one metric: text takes as much room everywhere

FONT_SIZE = 12

# Petroff's ten, found by search to be apart under color-vision deficiency, arXiv 2107.02270, figure 6.
PALETTE = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)

MEASURED, PREDICTED, BETWEEN = PALETTE[0], PALETTE[1], PALETTE[6]  # the last: of both at once

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

DASHES = ((1, 0), (6, 3), (2, 2))  # lines of the first ten, the second and the third


def colors(count: int) -> list[str]:
    """Return the colors of so many curves."""
    return [PALETTE[place % len(PALETTE)] for place in range(count)]


def shapes(count: int) -> list[str]:
    """Return the shapes of the points of so many curves."""
    return [SHAPES[place % len(SHAPES)] for place in range(count)]


def dashes(count: int) -> list[list[int]]:
    """Return the dashes of so many curves."""
    return [list(DASHES[place // len(PALETTE) % len(DASHES)]) for place in range(count)]


def step(bars: int) -> int:
    """Return the height of each of so many bars in pixels."""
    return STEP if bars <= MANY else NARROW_STEP


def config(dark: bool = False) -> dict[str, Any]:
    """Return the config of Vega-Lite for these charts: everything that depends on the background."""
    text, muted, grid, behind = ("#e6e6e6", "#a8a8a8", "#3c3c3c", "#1b1b1f") if dark else _LIGHT
    line = {"color": muted, "strokeWidth": 1.5}
    axis = {"labelColor": text, "titleColor": text, "tickColor": grid, "domainColor": muted, "gridColor": grid}
    legend = {"labelColor": text, "titleColor": text, "symbolStrokeColor": muted}
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": axis
        | {
            "labelFontSize": FONT_SIZE,
            "titleFontSize": FONT_SIZE,
            "titleFontWeight": "normal",
            "labelLimit": LABEL_LIMIT,
        }
        | {"labelOverlap": "greedy", "tickCount": 7},
        "axisX": {"tickCount": 5},
        "legend": legend
        | {
            "labelFontSize": FONT_SIZE,
            "titleFontSize": FONT_SIZE,
            "titleFontWeight": "normal",
            "labelLimit": LABEL_LIMIT,
        },
        "bar": {"stroke": behind, "strokeWidth": 0.75},
        "point": {"opacity": 1},
        "tick": {"opacity": 1},
        "text": {"color": text, "fontSize": FONT_SIZE - 1},
        "style": {
            "value": {"color": text},
            "ended": {"color": muted, "fontStyle": "italic"},
            "limit": {"color": text, "strokeWidth": 1.5, "strokeDash": [6, 3]},
            "reference": line | {"strokeDash": [4, 3]},
            "front": line | {"color": text},
            "spread": {"color": text, "strokeWidth": 1.5},
            "predicted": {"color": text, "fontSize": FONT_SIZE + 3},
            "formula": {"color": text},
        },
    }


_LIGHT = ("#1f1f1f", "#6a6a6a", "#e2e2e2", "#ffffff")
