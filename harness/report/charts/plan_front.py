"""The chart of a plan's front: the layouts that are faster than all that need less memory."""

from collections.abc import Sequence

from harness.planner.predict import Prediction
from harness.report.charts import style
from harness.report.document import Chart, Table, VegaLite

GIB = 2**30

_MEMORY, _SPEED = "memory that a device must have (GiB)", "tokens per second (higher is better)"

_PLACE = {"type": "quantitative", "scale": {"zero": True, "nice": True}}


def front_sentence(front: Sequence[Prediction]) -> str:
    """Return the front in one sentence."""
    if not front:
        return "No layout of this model has a place on a front of memory against speed."
    first, last = front[0], front[-1]
    if len(front) == 1:
        return (
            f"One layout alone is on the front, with {first.tokens_per_second:,.0f} tokens/s in {_gib(first):.1f} GiB."
        )
    return (
        f"{len(front)} layouts are on the front, as no layout that needs less memory is faster: from"
        f" {last.tokens_per_second:,.0f} tokens/s in {_gib(last):.1f} GiB to {first.tokens_per_second:,.0f} tokens/s in"
        f" {_gib(first):.1f} GiB of a device."
    )


def front_chart(front: Sequence[Prediction]) -> Chart | None:
    """Draw the front, with the memory of the devices; None where there is nothing to draw."""
    if not front:
        return None
    first = front[0]
    kinds = list(dict.fromkeys(kind_of(entry) for entry in front))
    colors = style.strategy_colors(kinds)
    points = [
        {
            "x": round(_gib(entry), 3),
            "y": round(entry.tokens_per_second, 3),
            "label": entry.label(),
            "kind": kind_of(entry),
        }
        for entry in front
    ]
    limit = first.available_bytes / GIB
    sentence = front_sentence(front)
    place = {"x": {"field": "x", "title": _MEMORY, **_PLACE}, "y": {"field": "y", "title": _SPEED, **_PLACE}}
    tooltip = [
        {"field": "label", "title": "layout"},
        {"field": "x", "type": "quantitative", "format": ",.1f", "title": "GiB of a device"},
        {"field": "y", "type": "quantitative", "format": ",.0f", "title": "tokens per second"},
    ]
    color = {
        "field": "kind",
        "type": "nominal",
        "title": "model state",
        "scale": {"domain": kinds, "range": [colors[kind] for kind in kinds]},
        "legend": {"orient": "bottom", "columns": 4},
    }
    line = {"type": "line", "interpolate": "step-after", "style": "front"}
    at_limit = {"x": {"datum": limit, "type": "quantitative"}}
    words = {"type": "text", "align": "right", "dx": -4, "dy": 4, "baseline": "top", "style": "value"}
    spec: VegaLite = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {
            "text": "Memory and speed",
            "subtitle": [f"{first.config.model.name} on {first.layout.world_size} devices of {first.cluster.name}"],
        },
        "description": sentence,
        "width": style.WIDTH,
        "height": style.HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 20, "top": 4, "right": 8, "bottom": 4},
        "usermeta": {"fluid": True},
        "params": [{"name": "hidden", "value": []}],
        "datasets": {"front": points},
        "layer": [
            {"data": {"name": "front"}, "mark": line, "encoding": place | {"order": {"field": "x"}}},
            {"data": {"values": [{}]}, "mark": {"type": "rule", "style": "limit"}, "encoding": at_limit},
            {
                "data": {"values": [{}]},
                "mark": words,
                "encoding": at_limit | {"y": {"value": 0}, "text": {"value": f"a device: {limit:.1f} GiB"}},
            },
            {
                "data": {"name": "front"},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": place | {"color": color, "tooltip": tooltip},
            },
        ],
    }
    rows = [(entry.label(), f"{_gib(entry):.1f}", f"{entry.tokens_per_second:,.0f}") for entry in front]
    return Chart("front", "Memory and speed", sentence, spec, Table(["layout", "GiB of a device", "tokens/s"], rows))


def kind_of(prediction: Prediction) -> str:
    """Return how a layout shares model state among data-parallel ranks, in two words."""
    layout = prediction.layout
    if layout.zero_stage:
        return f"ZeRO-{layout.zero_stage}"
    return "replicas" if layout.dp > 1 else "no data parallelism"


def _gib(prediction: Prediction) -> float:
    return prediction.needed_bytes / GIB
