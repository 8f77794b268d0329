"""The dot plot of the papers' figures beside the measured ones."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.charts import bar_marks, marks
from harness.report.charts.lines import Datum, chart_lines
from harness.report.charts.style import alt
from harness.report.claim_peers import Claim
from harness.report.document import Chart
from harness.report.text import pluralize
from harness.report.view import View
from harness.util.text import sanitize


def measured_against_papers(view: View, claims: Sequence[Claim]) -> Chart | None:
    """Draw each claim's figure at this layout and the measured one on one row, those that are farthest apart first."""
    known = [claim for claim in claims if claim.expected > 0 and claim.measured > 0]
    if not known:
        return None
    known.sort(key=_apart, reverse=True)
    strategies = {line.label: line.strategy for line in chart_lines(view)}
    values: list[Datum] = [
        {
            "strategy": strategies.get(sanitize(claim.label), ""),
            "label": f"{sanitize(claim.label)}: {claim.subject}",
            "position": position,
            "expected": claim.expected,
            "measured": claim.measured,
            "apart": 100 * (claim.measured / claim.expected - 1),
        }
        for position, claim in enumerate(known)
    ]
    far = [claim for claim in known if not claim.agrees]
    text = (
        f"The figures of papers at this layout beside the measured ones, {pluralize(len(known), 'claim')}:"
        f" {len(known) - len(far)} agree."
        + (f" The farthest apart is {values[0]['label']}, by a factor of {_apart(known[0]):.2f}." if far else "")
    )
    title = "× (◇ paper, ● measured)"
    columns = {
        "claim": [value["label"] for value in values],
        "paper at this layout": [f"{value['expected']:.3g}" for value in values],
        "measured": [f"{value['measured']:.3g}" for value in values],
        "difference (%)": [f"{value['apart']:+.1f}" for value in values],
    }
    drawn, layers = [value["strategy"] for value in values], _layers(view, values, title)
    name, measure = "Measured against the papers", "difference (%)"
    return bar_marks.bar_chart(view, "papers", name, text, drawn, layers, columns, measure, margin=0, noun="claims")


def _apart(claim: Claim) -> float:
    ratio = claim.measured / claim.expected
    return max(ratio, 1 / ratio)


def _layers(view: View, values: Sequence[Datum], title: str) -> list[alt.Chart]:
    """Return the connected dots of each claim."""
    ends = [value[name] for value in values for name in ("expected", "measured")]
    low, high = min(ends), max(ends)
    scale = alt.Scale(type="log", domain=[low / 1.2, high * 1.2], nice=False)
    expected, measured = (alt.X(f"{name}:Q", title=title, scale=scale) for name in ("expected", "measured"))
    y = bar_marks.label_axis()
    tooltip = marks.tooltips(
        ("expected:Q", "paper at this layout", ".3~g"),
        ("measured:Q", "measured", ".3~g"),
        ("apart:Q", "difference, %", "+.1f"),
    )
    layer = bar_marks.bar_layer(values)
    return [
        layer.mark_rule(style="quiet").encode(x=expected, x2="measured:Q", y=y),
        layer.mark_point(filled=False, shape="diamond", size=90, strokeWidth=1.5, style="paper").encode(
            x=expected, y=y, tooltip=tooltip
        ),
        layer.mark_point(filled=True, size=55, opacity=1).encode(
            x=measured, y=y, tooltip=tooltip, color=marks.strategy_color(view)
        ),
    ]
