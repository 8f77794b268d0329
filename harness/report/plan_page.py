"""The page of a search of layouts: memory against speed, with a slider for the memory of a device. It loads nothing."""

import html
import json
from collections.abc import Sequence

from harness.planner.predict import Prediction
from harness.planner.search import SearchResult

_WIDTH, _HEIGHT, _EDGE = 640, 320, 48  # pixels of the picture

_STYLE = "body{font:16px system-ui;max-width:44rem;margin:2rem auto;padding:0 1rem}svg{width:100%}input{width:100%}"

_SCRIPT = """
const front = JSON.parse(document.getElementById("front").textContent);
const slider = document.getElementById("memory"), answer = document.getElementById("answer");
function show() {
  const fitting = front.filter(entry => entry.gib <= Number(slider.value));
  const limit = Number(slider.value).toFixed(0) + " GiB a device: ";
  answer.textContent = limit + (fitting.length ? fitting[0].text : "nothing fits.");
  document.querySelectorAll("circle").forEach((mark, index) => {
    mark.setAttribute("fill", front[index].gib <= Number(slider.value) ? "#0072b2" : "#bbb");
  });
}
slider.addEventListener("input", show);
show();
"""


def front_sentence(front: Sequence[Prediction]) -> str:
    """Return the front in one sentence."""
    if not front:
        return "No layout of this model fits any device."
    first, last = front[0], front[-1]
    return (
        f"From {_gib(last):.1f} GiB at {last.tokens_per_second:,.0f} tokens a second to {_gib(first):.1f} GiB at"
        f" {first.tokens_per_second:,.0f}, {len(front)} layouts are faster than all that need less memory."
    )


def plan_page(result: SearchResult, lines: Sequence[str]) -> str:
    """Return the page of a search: its sentences, and the front as a picture with a slider for memory."""
    front = result.front
    entries = [
        {"gib": _gib(entry), "text": f"{entry.label()}, {entry.tokens_per_second:,.0f} tokens/s"} for entry in front
    ]
    most = max((_gib(entry) for entry in front), default=1.0) + 1
    limit = front[0].available_bytes / 2**30 if front else most
    data = json.dumps(entries).replace("<", "\\u003c")
    paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Plan</title><style>{_STYLE}</style><h1>Plan</h1>"
        f"<p>{html.escape(front_sentence(front))}</p>{_picture(front)}"
        f'<label for=memory>Memory of a device</label><input id=memory type=range min=1 max="{most:.0f}"'
        f' step=1 value="{limit:.0f}"><p id=answer></p>{paragraphs}'
        f"<script type=application/json id=front>{data}</script><script>{_SCRIPT}</script></html>"
    )


def _picture(front: Sequence[Prediction]) -> str:
    """Return the front as SVG, memory to the right and tokens a second upward, each axis from 0."""
    if not front:
        return ""
    widest, highest = max(map(_gib, front)), front[0].tokens_per_second
    marks = []
    for entry in front:
        x = _EDGE + _gib(entry) / widest * (_WIDTH - 2 * _EDGE)
        y = _HEIGHT - _EDGE - entry.tokens_per_second / highest * (_HEIGHT - 2 * _EDGE)
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r=5><title>{html.escape(entry.label())}</title></circle>')
    bottom, right = _HEIGHT - _EDGE, _WIDTH - _EDGE
    axes = f'<path d="M{_EDGE} {_EDGE}V{bottom}H{right}" fill=none stroke=#888 />'
    texts = (
        f'<text x="{right}" y="{bottom + 24}" text-anchor=end>peak memory, {widest:.1f} GiB at the right</text>'
        f'<text x="{_EDGE}" y="{_EDGE - 12}">tokens a second, {highest:,.0f} at the top</text>'
    )
    sentence = html.escape(front_sentence(front))
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img aria-label="{sentence}">{axes}{"".join(marks)}{texts}</svg>'


def _gib(prediction: Prediction) -> float:
    return prediction.memory.peak_bytes / 2**30
