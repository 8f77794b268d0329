"""The page report.html: the report as one file that loads nothing else, for any browser, a phone and paper.

Text and tables are in the HTML and can be read without scripts; page/page.js adds sorting, filters and charts.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from markupsafe import Markup

from harness.records.schema import COLUMNS
from harness.report.charts import style
from harness.report.document import FOLDER, Chart, Section, Table, heading, template, walk
from harness.report.document import charts as all_charts
from harness.report.overview import ExplorerData
from harness.util.text import sanitize

_OWN_ANCHORS = ("top", "main", "contents", "axes", "filter")  # of the page itself


def page(
    title: str,
    sections: Sequence[Section],
    explorer: ExplorerData | None,
    library: str,
    svgs: Mapping[str, str] | None = None,
    **more: Any,
) -> str:
    """Return the whole page.

    Args:
        title: The name of the page, which is its heading if no section has one.
        sections: The report.
        explorer: The data of the chart whose axes the reader chooses, if there is one.
        library: A script that sets `vegaEmbed`.
        svgs: Charts as SVG by their names, which are shown until a script has drawn them, and where scripts are off.
        more: More data of the page: `latex`, the comparison as a LaTeX table, to save; `derivations`, how the figures
            of the table with `keys` were worked out, see `harness.report.derivations.pack`; or the `rows` of a plan by
            what they are, for readers of the data.
    """
    charts = list(all_charts(sections))
    strategies = _strategies(sections, explorer)
    data = {
        "charts": [
            {"spec": chart.spec | {"description": chart.alt_text}, "name": chart.name, "measure": chart.measure}
            for chart in charts
        ],
        "explorer": explorer and {"rows": explorer.rows, "texts": explorer.texts, "numbers": explorer.numbers},
        "colors": style.strategy_colors(strategies),
        "name": title,
        "latex": "",
        "derivations": None,
        "config": (style.config(), style.config(dark=True)),
    } | more
    css, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    library = _script(library)
    html = template("page.html.j2", sanitize, identity=id).render(
        title=title,
        heading=heading(sections, title),
        helps={name: column.help for name, column in COLUMNS.items()},
        sections=sections,
        anchors=_anchors(sections),
        explorer=explorer,
        positions={id(chart): position for position, chart in enumerate(charts)},
        svgs={name: _data_url(svg) for name, svg in (svgs or {}).items()},
        strategies=strategies,
        latex=bool(data["latex"]),
        # None of the data's text ends the script element or begins a comment.
        data=Markup(json.dumps(data, allow_nan=False, default=str).replace("<", "\\u003c")),
        style=Markup(css),
        script=Markup(script),
        library=Markup(library),
        policy=_policy(css, script, library),
    )
    return html.lstrip()


def _policy(css: str, script: str, library: str) -> str:
    """Return what a browser may load: nothing but the page's own style and scripts.

    Vega interprets its expressions (`ast: true` in page.js), so no 'unsafe-eval' is needed.
    """
    scripts = f"script-src {_digest(script)} {_digest(library)}"
    rest = ("img-src data:", "base-uri 'none'", "form-action 'none'")
    return "; ".join(("default-src 'none'", f"style-src {_digest(css)}", scripts, *rest))


def _anchors(sections: Sequence[Section]) -> dict[int, str]:
    """Return the unique ids in the page of the sections that have titles, made from these."""
    anchors: dict[int, str] = {}
    for section in (section for section in walk(sections) if section.title):
        slug = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")[:40].strip("-") or "section"
        names = chain([slug], (f"{slug}-{place}" for place in count(2)))
        anchors[id(section)] = next(name for name in names if name not in {*_OWN_ANCHORS, *anchors.values()})
    return anchors


def _strategies(sections: Sequence[Section], explorer: ExplorerData | None) -> list[str]:
    """Return every strategy that a row belongs to, in the order of the page; marks have those of their chart's rows."""
    parts = [*(part for section in walk(sections) for part in section.parts), explorer]
    shown = [part for part in parts if isinstance(part, Table | Chart | ExplorerData)]
    tables = [part if isinstance(part, Table) else part.table for part in shown]
    return list(dict.fromkeys(strategy for table in tables for strategy in table.strategies if strategy))


def _script(text: str) -> str:
    """Return a script as an element's text, with the line ends that a parser of HTML makes: the digest covers them."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data_url(svg: str) -> str:
    """Return a picture to embed; the page describes it, so that its marks need no names of their own."""
    svg = re.sub(r' (?:aria-[a-z]+|role)="[^"]*"', "", svg)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode('utf-8', 'replace')).decode()}"
