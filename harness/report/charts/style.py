"""Colors and sizes of charts, and the config of Vega-Lite for light and dark pages, which is theme.json.

A spec names styles and contains no config.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

WIDTH, HEIGHT = 620, 340  # in pixels: the width of a whole chart with its axes, and the height of a plot without bars

EDGES = 44  # pixels at the left and right of all plots

STEP, NARROW_STEP, MANY = 20, 15, 12  # pixels per bar, and per bar where there are more than so many

LINE = 13  # pixels of a line of text

LONG = 24  # characters: a longer label of a bar has several lines

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # fonts with equal metrics: text is equally wide everywhere

FONT_SIZE = 12

# Petroff's ten colors, which remain distinct under color-vision deficiency, arXiv 2107.02270, figure 6.
PALETTE = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)

# The parts of a step and of a peak, in greens and pinks, which no strategy has, dark beside light.
PARTS = (
    *("#22601a", "#7cbb45", "#4a9127", "#aedb7c", "#8e0a58"),
    *("#df6dac", "#c4267f", "#efa6cf", "#d9f0b8", "#f9d8ea"),
)

# The strategies that most reports compare, which have their places in the palette, so that reports agree on colors.
_PLACED = (
    *("ddp", "zero1", "zero3", "single", "fsdp_full_shard", "tp", "zero2", "fsdp_shard_grad_op"),
    *("pp_1f1b", "cp"),
)

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])  # for the curves of one strategy

_LIGHT = {"text": "#1f1f1f", "muted": "#6a6a6a", "grid": "#e2e2e2", "behind": "#ffffff"}
_DARK = {"text": "#e6e6e6", "muted": "#a8a8a8", "grid": "#3c3c3c", "behind": "#1b1b1f"}


def plot_width(width: int, columns: int, beside: int) -> int:
    """Return the pixels of each of the plots of a row of a chart, which have so many pixels beside them."""
    return (width - EDGES) // columns - beside


def strategy_colors(strategies: Iterable[str]) -> dict[str, str]:
    """Return the color of each strategy of a report, which all its charts use.

    Up to ten strategies have ten colors; more share some.
    """
    names = list(dict.fromkeys(strategies))
    places = {name: place for place, name in enumerate(_PLACED) if name in names}
    free = [place for place in range(len(PALETTE)) if place not in places.values()] or list(range(len(PALETTE)))
    others = [name for name in names if name not in places]
    places |= {name: free[rank % len(free)] for rank, name in enumerate(others)}
    return {name: PALETTE[places[name]] for name in names}


@cache
def config(dark: bool = False) -> dict[str, Any]:
    """Return the config of Vega-Lite for these charts: everything that depends on the background."""
    theme = Template(Path(__file__).with_name("theme.json").read_text(encoding="utf-8"))
    return dict(json.loads(theme.substitute(_DARK if dark else _LIGHT, font=FONT)))
