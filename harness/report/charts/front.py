"""The front of a plan: memory against speed of the layouts that no other beats in both."""

from collections.abc import Sequence

from harness.cost_model.prediction import Prediction
from harness.layout.layout import Layout
from harness.report.charts import style
from harness.report.charts.marks import Field, Plot, Rows, axis, draw, figures, palette, single
from harness.report.document import Chart
from harness.report.lines import Item
from harness.report.view import View

GIB = 2**30


def front_chart(front: Sequence[Prediction]) -> Chart | None:
    """Draw the front, with the memory of the devices; None where there is nothing to draw."""
    if not front:
        return None
    kinds = [_kind(entry.layout) for entry in front]
    fields = {
        "x": figures("GiB of a device", [entry.needed_bytes / GIB for entry in front], ",.1f"),
        "y": figures("tokens/s", [entry.tokens_per_second for entry in front], ",.0f"),
        "kind": Field("model state", kinds),
    }
    rows = Rows([Item(entry.label(), "", place) for place, entry in enumerate(front)], fields, "layout")
    x, y = axis("memory that a device must have (GiB)"), axis("tokens per second (higher is better)")
    plot, limit = Plot(View("plan", []), rows, x, y), front[0].available_bytes / GIB
    layers = [
        plot.mark("line front", order={"field": "x", "type": "quantitative"}),
        plot.mark("rule limit", "limit", None, data="limits"),
        plot.mark("text corner", "limit", {"value": 0}, data="limits", text="shown"),
        plot.mark("point", color=palette("kind", style.strategy_colors(kinds), {"orient": "bottom"})),
    ]
    return draw(
        plot.view,
        "front",
        "Memory and speed",
        rows,
        "",
        single(layers),
        facts={"front": front},
        data={"limits": [{"strategy": "", "limit": limit, "shown": f"a device: {limit:.1f} GiB"}]},
        subtitle=[f"{front[0].config.model.name} on {front[0].layout.world_size} devices of {front[0].cluster.name}"],
    )


def _kind(layout: Layout) -> str:
    """Return how a layout shares model state among data-parallel ranks, in two words."""
    whole = "replicas" if layout.dp > 1 else "no data parallelism"
    return f"ZeRO-{layout.zero_stage}" if layout.zero_stage else whole
