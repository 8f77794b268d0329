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
from collections.abc import Iterable, Mapping
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

_NARROW = 500  # pixels of a picture that is too narrow for plots beside each other

_BOLD, _LETTER = 7.5, 6.2  # pixels of a character of a title, and of the setting under it

_CACHE = Path("~/.cache/harness")

# The names that the library's file defines for the page.
_SNIPPET = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"


class DrawingError(RuntimeError):
    """Charts could not be drawn; the message is one line."""


def svgs(specs: Mapping[str, VegaLite], dark: bool = False) -> dict[str, str]:
    """Return every spec as a whole SVG document, the same for the same spec. Raise DrawingError if that fails."""
    described = {}
    for name, svg in _drawn(specs, "svg", dark=dark).items():
        root, rest = svg.split(">", 1)
        text = str(specs[name].get("description", ""))
        # The attributes are those that Vega sets in a browser.
        roles = f'role="graphics-document" aria-roledescription="visualization" aria-label={quoteattr(text)}'
        described[name] = f"{root} {roles}><desc>{escape(text)}</desc>{rest}\n"
    return described


def _drawn(specs: Mapping[str, VegaLite], form: str, scale: float = 1.0, dark: bool = False) -> dict[str, str]:
    """Return every spec in a form, which is base64 but for svg."""
    config = style.config(dark) | {"background": "white"}
    return _request({"specs": dict(specs), "config": config, "form": form, "scale": scale}) if specs else {}


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
    scale, unit, dots = 1.0, "px", 2.0
    if width is not None:
        scale, unit, dots = _PAPER_FONT / style.FONT_SIZE, "pt", 300 / 72  # points of a pixel, and pixels of a point
        specs = {name: fit(spec, round(width / 25.4 * 72 / scale)) for name, spec in specs.items()}
    if form == "svg":
        return {name: _sized(text, scale, unit).encode() for name, text in svgs(specs).items()}
    # A pixel of a chart is a point of a PDF.
    drawn = _drawn(specs, form, scale * dots if form == "png" else scale)
    return {name: base64.b64decode(content) for name, content in drawn.items()}


def _sized(svg: str, scale: float, unit: str) -> str:
    """Return an SVG whose size is scaled; its drawing is what it was."""

    def size(match: re.Match[str]) -> str:
        width, height = (f"{float(pixels) * scale:g}{unit}" for pixels in match.groups()[1:])
        return f'{match[1]} width="{width}" height="{height}"'

    return re.sub(r'^(<svg\b[^>]*?) width="([\d.]+)" height="([\d.]+)"', size, svg)


def fit(spec: VegaLite, width: int) -> VegaLite:
    """Return a spec for another width in pixels; if that is small, plots and legends have one column."""
    title = {
        "text": textwrap.wrap(spec["title"]["text"], round(width / _BOLD)),
        "subtitle": textwrap.wrap(" ".join(spec["title"]["subtitle"]), round(width / _LETTER)),
    }
    is_narrow = width < _NARROW
    fitted: VegaLite = spec | {"title": title} | ({"config": {"legend": {"columns": 1}}} if is_narrow else {})
    if "columns" not in spec:
        return fitted | {"width": width}
    columns = 1 if is_narrow else spec["columns"]
    params = [param | {"value": columns} if param["name"] == "columns" else param for param in spec["params"]]
    each = {"width": style.plot_width(width, columns, spec["usermeta"]["beside"])}
    plots = {"spec": spec["spec"] | each} if "spec" in spec else {"concat": [cell | each for cell in spec["concat"]]}
    return fitted | {"columns": columns, "params": params} | plots


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


def _answer(request: dict[str, Any]) -> dict[str, str]:
    import vl_convert

    if "snippet" in request:
        return {"library": vl_convert.javascript_bundle(request["snippet"])}
    answer = {}
    for name, spec in request["specs"].items():
        try:
            drawn = _converted(spec, request["form"], request["scale"], request["config"])
        except Exception as error:
            message = " ".join(line for line in str(error).splitlines() if not line.lstrip().startswith("at "))
            sys.exit(f"{name}: {one_line(message)[:300]}")
        answer[name] = drawn if isinstance(drawn, str) else base64.b64encode(drawn).decode()
    return answer


def _converted(spec: VegaLite, form: str, scale: float, config: dict[str, Any]) -> str | bytes:
    import vl_convert

    if form == "png":
        png: bytes = vl_convert.vegalite_to_png(spec, scale=scale, config=config, allowed_base_urls=[])
        return png
    svg: str = vl_convert.vegalite_to_svg(spec, config=config, allowed_base_urls=[])
    return svg if form == "svg" else vl_convert.svg_to_pdf(_sized(svg, scale, ""))


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
