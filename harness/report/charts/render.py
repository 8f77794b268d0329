"""Specs rendered as SVG, and Vega's library for a page, by vl_convert in a process of its own, as it may crash.

The process runs this module: it reads a request as JSON from standard input and writes the answer to standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from harness.report.charts import style
from harness.util.files import atomic_write_text
from harness.util.text import one_line

if TYPE_CHECKING:
    from harness.report.document import VegaLite

_SECONDS = 120.0  # for all charts of a report

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


def _answer(request: dict[str, Any]) -> dict[str, str]:
    import vl_convert

    if "snippet" in request:
        return {"library": vl_convert.javascript_bundle(request["snippet"])}
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
