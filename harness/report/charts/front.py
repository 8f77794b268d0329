"""The front of a plan: memory against speed of the layouts that no other beats in both."""

from collections.abc import Sequence
from typing import Any

from harness.cost_model.prediction import Prediction
from harness.report.charts import marks, style
from harness.report.charts.marks import Field, Rows, Scale
from harness.report.document import Chart
from harness.report.lines import Item
from harness.report.sentences import sentence

GIB = 2**30


def front_sentence(front: Sequence[Prediction]) -> str:
    """Return the front in one sentence."""
    text: str = sentence("front_chart", rows=front, ends=_ends(front))
    return text


def _ends(front: Sequence[Prediction]) -> list[str]:
    return [f"{entry.tokens_per_second:,.0f} tokens/s in {_gib(entry):.1f} GiB" for entry in front]


def front_chart(front: Sequence[Prediction]) -> Chart | None:
    """Draw the front, with the memory of the devices; None where there is nothing to draw."""
    if not front:
        return None
    first = front[0]
    sizes, speeds = [_gib(entry) for entry in front], [entry.tokens_per_second for entry in front]
    kinds = [kind_of(entry) for entry in front]
    fields = {
        "x": Field("GiB of a device", [round(size, 3) for size in sizes], [f"{size:.1f}" for size in sizes], ",.1f"),
        "y": Field("tokens/s", [round(speed, 3) for speed in speeds], [f"{speed:,.0f}" for speed in speeds], ",.0f"),
        "kind": Field("model state", kinds),
    }
    rows = Rows([Item(entry.label(), "", place) for place, entry in enumerate(front)], fields, "layout")
    x, y = Scale("memory that a device must have (GiB)"), Scale("tokens per second (higher is better)")
    place: dict[str, Any] = {"x": x.channel("x"), "y": y.channel("y")}
    color = marks.palette("kind", style.strategy_colors(kinds), {"orient": "bottom"})
    limit = first.available_bytes / GIB
    limits = [{"strategy": "", "limit": limit, "shown": f"a device: {limit:.1f} GiB"}]
    layers = [
        marks.layer("line front", order={"field": "x", "type": "quantitative"}, **place),
        marks.layer("rule limit", "limits", x=x.channel("limit")),
        marks.layer("text corner", "limits", x=x.channel("limit"), y={"value": 0}, text="shown"),
        marks.layer("point", color=color, tooltip=rows.tooltip, **place),
    ]
    setting = [f"{first.config.model.name} on {first.layout.world_size} devices of {first.cluster.name}"]
    facts, data = {"ends": _ends(front)}, {"limits": limits}
    return marks.draw("front", "Memory and speed", setting, rows, "", marks.single(layers), facts, data)


def kind_of(prediction: Prediction) -> str:
    """Return how a layout shares model state among data-parallel ranks, in two words."""
    layout = prediction.layout
    if layout.zero_stage:
        return f"ZeRO-{layout.zero_stage}"
    return "replicas" if layout.dp > 1 else "no data parallelism"


def _gib(prediction: Prediction) -> float:
    return prediction.needed_bytes / GIB
