"""Colors, sizes and Vega-Lite's configs for light and dark pages; and altair, imported when it is first used.

A spec names styles and contains no config.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt
else:

    class _LazyAltair:
        """A stand-in that imports altair only when it is used, because that import takes a third of a second.

        A chart is validated when it is whole, and its parts are not before that, which would take as long again.
        """

        def __getattr__(self, name: str) -> Any:
            import altair
            from altair.utils.schemapi import disable_debug_mode

            disable_debug_mode()
            return getattr(altair, name)

    alt = _LazyAltair()

__all__ = ["alt"]

WIDTH, HEIGHT = 620, 340  # in pixels: the width of a whole chart with its axes, and the height of a plot without bars

STEP, NARROW_STEP = 20, 15  # pixels per bar, and per bar where there are many

MANY = 12  # bars

LABEL_LIMIT = 380  # pixels

LONG = 24  # characters: a longer label of a bar has two lines where the chart is narrow

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # fonts with equal metrics: text is equally wide everywhere

FONT_SIZE = 12

# Petroff's ten colors, which remain distinct under color-vision deficiency, arXiv 2107.02270, figure 6.
PALETTE = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)

# The place in the palette of the strategies that most reports compare, so that reports agree on their colors.
_PLACES = {
    "ddp": 0,
    "zero1": 1,
    "zero3": 2,
    "single": 3,
    "fsdp_full_shard": 4,
    "tp": 5,
    "zero2": 6,
    "fsdp_shard_grad_op": 7,
    "pp_1f1b": 8,
    "cp": 9,
}

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2))  # for the curves of one strategy


def strategy_colors(strategies: Iterable[str]) -> dict[str, str]:
    """Return the color of each strategy of a report, which all its charts use.

    Up to ten strategies have ten colors; more share some.
    """
    names = list(dict.fromkeys(strategies))
    places = {name: _PLACES[name] for name in names if name in _PLACES}
    free = [place for place in range(len(PALETTE)) if place not in places.values()] or list(range(len(PALETTE)))
    others = [name for name in names if name not in places]
    places |= {name: free[rank % len(free)] for rank, name in enumerate(others)}
    return {name: PALETTE[places[name]] for name in names}


def shapes(count: int) -> list[str]:
    """Return the shapes of the points of this many curves."""
    return [SHAPES[position % len(SHAPES)] for position in range(count)]


def dashes(count: int) -> list[list[int]]:
    """Return the dashes of this many curves."""
    return [list(DASHES[position % len(DASHES)]) for position in range(count)]


def step(bars: int) -> int:
    """Return the height in pixels of each of this many bars."""
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
        "title": {"color": text, "subtitleColor": muted, "fontSize": FONT_SIZE + 1, "subtitleFontSize": FONT_SIZE - 1}
        | {"anchor": "start", "frame": "bounds", "offset": 8, "subtitlePadding": 2},
        "concat": {"spacing": 16},
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
            "quiet": {"color": muted},
            "paper": {"color": text, "stroke": text},
            "predicted": {"color": text, "fontSize": FONT_SIZE + 3},
            "formula": {"color": text},
        },
    }


_LIGHT = ("#1f1f1f", "#6a6a6a", "#e2e2e2", "#ffffff")
