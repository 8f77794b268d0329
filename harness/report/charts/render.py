"""Specs rendered as SVG, and Vega's library for a page, by vl_convert in a process of its own, as it may crash.

The process runs this module: it reads a request as JSON from standard input and writes the answer to standard output.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from harness.report.charts import style
from harness.util.files import atomic_write_text
from harness.util.text import one_line, sanitize

if TYPE_CHECKING:
    from harness.report.document import Chart, VegaLite

_SECONDS = 120.0  # for all charts of a report

_PAPER_FONT = 8.0  # points of a label in a paper

_NARROW, _EDGES, _LETTER = 500, 44, 6.2  # pixels, as in page.js: a narrow chart, its edges, and a subtitle's character

_BOLD = 7.5  # pixels of a title's character

_PLOT = 0.55  # of a chart's width that its plot has, at least

_TWO_LINES = 28  # pixels of a bar whose label has two lines, as in page.js

_CACHE = Path("~/.cache/harness")

# The names that the library's file defines for the page.
_SNIPPET = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"


class DrawingError(RuntimeError):
    """Charts could not be drawn; the message is one line."""


def svgs(specs: Mapping[str, VegaLite], dark: bool = False) -> dict[str, str]:
    """Return every spec as a whole SVG document, the same for the same spec. Raise DrawingError if that fails."""
    if not specs:
        return {}
    drawn = _request({"specs": dict(specs), "config": style.config(dark) | {"background": "white"}})
    return {name: _described(drawn[name], str(spec.get("description", ""))) for name, spec in specs.items()}


def drawn(charts: Iterable[Chart], consequence: str) -> dict[str, str]:
    """Return the charts as SVG by their names. If that fails there are none, and the error's output says so and why."""
    try:
        return svgs({chart.name: chart.spec for chart in charts})
    except DrawingError as error:
        print(f"{consequence}: {sanitize(error)}", file=sys.stderr)
        return {}


def pictures(specs: Mapping[str, VegaLite], form: str, width: float | None = None) -> dict[str, bytes]:
    """Return every spec as a file. Raise DrawingError if that fails.

    Args:
        specs: The charts by their names.
        form: svg, png or pdf.
        width: The width in millimetres; by default that of the report, at 96 pixels per inch.
    """
    if not specs:
        return {}
    if width is None:
        texts, unit, zoom = svgs(specs), "px", 2.0
    else:
        scale = _PAPER_FONT / style.FONT_SIZE  # points of a pixel
        fitted = svgs({name: fit(spec, round(width / 25.4 * 72 / scale)) for name, spec in specs.items()})
        texts, unit, zoom = {name: _sized(text, scale) for name, text in fitted.items()}, "pt", 300 / 72
    if form == "svg":
        size = rf'\1 width="\2{unit}" height="\3{unit}"'
        return {name: re.sub(_SIZE, size, text).encode() for name, text in texts.items()}
    # vl_convert takes the pixels of an SVG for points of a PDF.
    contents = _request({"svgs": texts, "form": form, "scale": zoom})
    return {name: base64.b64decode(content) for name, content in contents.items()}


_SIZE = r'^(<svg\b[^>]*?) width="([\d.]+)" height="([\d.]+)"'


def fit(spec: VegaLite, width: int) -> VegaLite:
    """Return a spec for another width in pixels; as in the page, fewer plots are beside each other if it is narrow."""
    title = {
        "text": _wrapped([spec["title"]["text"]], round(width * _LETTER / _BOLD)),
        "subtitle": _wrapped(spec["title"]["subtitle"], width),
    }
    fitted: VegaLite = _with_short_titles(spec, width) | {"title": spec["title"] | title}
    if width < _NARROW:
        fitted = _narrowed(_replaced(fitted, "legend", {"columns": 1}))
    if "concat" not in spec:
        return fitted | {"width": width}
    meta = spec["usermeta"]["panels"]
    columns, beside = meta["narrow"] if width < _NARROW else (meta["columns"], meta["beside"])
    each = max(60, (width - _EDGES - beside) // columns)
    cells = [cell | {"width": each} for cell in fitted["concat"]]
    if columns == 1:  # the labels that only the first plot of a row has
        cells = [_replaced(cell, "axis", {"labels": True, "ticks": True, "domain": True}, "labels") for cell in cells]
    return fitted | {"columns": columns, "concat": cells}


def _with_short_titles(value: Any, width: int) -> Any:
    """Return a spec whose titles of axes have as many lines as they need in this width."""
    if isinstance(value, list):
        return [_with_short_titles(item, width) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: item if key == "datasets" else _with_short_titles(item, width) for key, item in value.items()}
    if isinstance(title := inner.get("title"), str) and len(title) * _LETTER > _PLOT * width:
        inner["title"] = _wrapped([title], round(_PLOT * width))
    return inner


def _narrowed(spec: VegaLite) -> VegaLite:
    """Return a spec whose long labels have two lines, which need bars that are far enough apart."""
    data = [datum for values in spec.get("datasets", {}).values() for datum in values]
    is_long = any(len(datum.get("bar") or datum.get("label") or "") > style.LONG for datum in data)
    params = [param | {"value": True} if param["name"] in ("narrow", "tiny") else param for param in spec["params"]]

    def spaced(plot: VegaLite) -> VegaLite:
        height = plot.get("height")
        if not (is_long and isinstance(height, dict)):
            return plot
        return plot | {"height": {"step": max(height["step"], _TWO_LINES)}}

    cells = {"concat": [spaced(cell) for cell in spec["concat"]]} if "concat" in spec else {}
    return spaced(spec | {"params": params} | cells)


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    return textwrap.wrap(" ".join(lines), max(20, round(width / _LETTER)))


def _replaced(value: Any, name: str, changes: Mapping[str, Any], unless: str = "") -> Any:
    """Return a spec in which every object of this name has the changes, except where `unless` is not False."""
    if isinstance(value, list):
        return [_replaced(item, name, changes, unless) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _replaced(item, name, changes, unless) for key, item in value.items()}
    own = inner.get(name)
    if isinstance(own, dict) and (not unless or own.get(unless) is False):
        inner[name] = {**own, **changes}
    return inner


def _sized(svg: str, scale: float) -> str:
    """Return an SVG whose size is scaled; its drawing is what it was."""
    return re.sub(
        _SIZE,
        lambda match: f'{match[1]} width="{float(match[2]) * scale:g}" height="{float(match[3]) * scale:g}"',
        svg,
    )


def library() -> str:
    """Return JavaScript for a <script> element that sets window.vegaEmbed, vega and vegaLite.

    It is stored in the user's cache, as it takes a second to make. Raise DrawingError if that fails.
    """
    path = _CACHE.expanduser() / f"vega-{version('vl-convert-python')}.js"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        script = str(_request({"snippet": _SNIPPET})["library"]).replace("</script", "<\\/script")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, script)
    except OSError:
        pass  # it is made again next time
    return script


def _described(svg: str, description: str) -> str:
    """Return the SVG with the attributes that Vega sets in a browser, and with a description."""
    root, rest = svg.split(">", 1)
    roles = f'role="graphics-document" aria-roledescription="visualization" aria-label={quoteattr(description)}'
    return f"{root} {roles}><desc>{escape(description)}</desc>{rest}\n"


def _request(request: dict[str, Any]) -> dict[str, str]:
    command = [sys.executable, "-m", __name__]
    try:
        process = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise DrawingError(f"the charts were not drawn within {_SECONDS:g} s") from None
    except OSError as error:
        raise DrawingError(f"the charts were not drawn: {error.strerror}") from None
    if process.returncode < 0:
        raise DrawingError(f"the charts were not drawn: vl_convert was ended by signal {-process.returncode}")
    if process.returncode:
        last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise DrawingError(f"the charts were not drawn: {one_line(''.join(last)) or 'no reason recorded'}")
    answer: dict[str, str] = json.loads(process.stdout)
    return answer


def _converted(svg: str, request: dict[str, Any]) -> bytes:
    import vl_convert

    if request["form"] == "pdf":
        pdf: bytes = vl_convert.svg_to_pdf(svg)
        return pdf
    png: bytes = vl_convert.svg_to_png(svg, scale=request["scale"])
    return png


def _answer(request: dict[str, Any]) -> dict[str, str]:
    import vl_convert

    if "snippet" in request:
        return {"library": vl_convert.javascript_bundle(request["snippet"])}
    if "svgs" in request:
        return {name: base64.b64encode(_converted(svg, request)).decode() for name, svg in request["svgs"].items()}
    drawn = {}
    for name, spec in request["specs"].items():
        try:
            drawn[name] = vl_convert.vegalite_to_svg(spec, config=request["config"], allowed_base_urls=[])
        except Exception as error:
            message = " ".join(line for line in str(error).splitlines() if not line.lstrip().startswith("at "))
            sys.exit(f"{name}: {one_line(message)[:300]}")
    return drawn


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
