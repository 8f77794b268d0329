"""Specs rendered as SVG, and Vega's library for a page, by vl_convert in a process of its own, as it may crash.

The process runs this module: it unpickles which function to call from standard input and pickles the answers.
"""

import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from harness.report.charts import style
from harness.report.document import VegaLite
from harness.util.files import atomic_write_text
from harness.util.text import one_line, sanitize

_SECONDS = 120.0  # for all charts of a report

_PAPER_FONT = 8.0  # points of a label in a paper

_NARROW = 500  # pixels of a picture that is too narrow for plots beside each other

_CACHE = Path("~/.cache/harness")

# The names that the library's file defines for the page.
_SNIPPET = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"


class DrawingError(RuntimeError):
    """Charts could not be drawn; the message is one line."""


@contextmanager
def failure_told(consequence: str) -> Iterator[None]:
    """If charts cannot be drawn in the block, end it and say what follows, and why, on the error's output."""
    try:
        yield
    except DrawingError as error:
        print(f"{consequence}: {sanitize(error)}", file=sys.stderr)


def svgs(specs: Mapping[str, VegaLite]) -> dict[str, str]:
    """Return every spec as a whole SVG document, the same for the same spec. Raise DrawingError if that fails."""
    drawn = _called("vegalite_to_svg", {name: _arguments(spec) for name, spec in specs.items()})
    return {name: _described(svg, str(specs[name].get("description", ""))) for name, svg in drawn.items()}


def _arguments(spec: VegaLite) -> dict[str, Any]:
    """Return what a function of vl_convert draws: a spec on white, which fetches nothing."""
    return {"vl_spec": spec, "config": style.config() | {"background": "white"}, "allowed_base_urls": []}


def _described(svg: str, text: str) -> str:
    """Return an SVG with the attributes that Vega sets in a browser, and a description."""
    roles = f'role="graphics-document" aria-roledescription="visualization" aria-label={quoteattr(text)}'
    return svg.replace(">", f" {roles}><desc>{escape(text)}</desc>", 1) + "\n"


def pictures(specs: Mapping[str, VegaLite], form: str, width: float | None = None) -> dict[str, bytes]:
    """Return every spec as a file. Raise DrawingError if that fails.

    Args:
        specs: The charts by their names.
        form: svg, png or pdf.
        width: The width in millimetres of pictures without titles; by default that of the report, at 96 pixels per
            inch, with titles.
    """
    scale, unit, ppi = 1.0, "px", 144
    if width is not None:
        scale, unit, ppi = _PAPER_FONT / style.FONT_SIZE, "pt", 300  # points of a pixel, and pixels of a PNG's inch
        specs = {name: fit(spec, round(width / 25.4 * 72 / scale)) for name, spec in specs.items()}
    if form == "png":
        return _called(
            "vegalite_to_png",
            {name: _arguments(spec) | {"scale": scale, "ppi": ppi} for name, spec in specs.items()},
        )
    if form == "svg":
        return {name: _sized(svg, scale, unit).encode() for name, svg in svgs(specs).items()}
    # A pixel of a chart is a point of a PDF.
    return _called("svg_to_pdf", {name: {"svg": _sized(svg, scale, "")} for name, svg in svgs(specs).items()})


def _sized(svg: str, scale: float, unit: str) -> str:
    """Return an SVG whose size is scaled; its drawing is what it was."""
    return re.sub(
        r'\b(width|height)="([\d.]+)"', lambda size: f'{size[1]}="{float(size[2]) * scale:g}{unit}"', svg, count=2
    )


def fit(spec: VegaLite, width: int) -> VegaLite:
    """Return a spec without title for another width in pixels; if it is small, plots and legends have one column."""
    is_narrow = width < _NARROW
    fitted: VegaLite = {key: value for key, value in spec.items() if key != "title"}
    narrow = {"legend": {"columns": 1}, "axis": {"labelOverlap": "parity", "labelSeparation": 4}}
    fitted |= {"config": narrow} if is_narrow else {}
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
    try:
        path = _CACHE.expanduser() / f"vega-{version('vl-convert-python')}.js"
    except PackageNotFoundError as error:
        raise DrawingError(f"the charts were not drawn: {error}") from None
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    bundle = _called("javascript_bundle", {"library": {"snippet": _SNIPPET}})["library"]
    script = str(bundle).replace("</script", "<\\/script")
    with suppress(OSError):  # it is made again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, script)
    return script


def _called(function: str, calls: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a function of vl_convert makes of the arguments of each name. Raise DrawingError if that fails."""
    if not calls:
        return {}
    command, request = [sys.executable, "-m", __name__], pickle.dumps((function, calls))
    try:
        process = subprocess.run(command, input=request, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise DrawingError(f"the charts were not drawn within {_SECONDS:g} s") from None
    except OSError as error:
        raise DrawingError(f"the charts were not drawn: {error.strerror}") from None
    if process.returncode:
        signal = f"vl_convert was ended by signal {-process.returncode}" if process.returncode < 0 else ""
        last = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DrawingError(f"the charts were not drawn: {signal or one_line(last) or 'no reason recorded'}")
    return dict(pickle.loads(process.stdout))


def _answers(function: str, calls: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the function's answers. End the program with the reason for the first that fails."""
    import vl_convert

    answers = {}
    for name, arguments in calls.items():
        try:
            answers[name] = getattr(vl_convert, function)(**arguments)
        except Exception as error:
            message = " ".join(line for line in str(error).splitlines() if not line.lstrip().startswith("at "))
            sys.exit(f"{name}: {one_line(message)[:300]}")
    return answers


if __name__ == "__main__":
    pickle.dump(_answers(*pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
