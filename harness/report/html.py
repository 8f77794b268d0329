"""The page report.html: the report as one file that loads nothing else, for any browser, a phone and paper.

Text and tables are in the HTML and can be read without scripts; page/page.js adds sorting, filters and charts.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from harness.records.columns import column
from harness.report.document import Best, BulletList, Chart, Paragraph, Section, Table
from harness.report.frame import STATE_COLUMNS, column_values, distinct_values
from harness.report.text import MILLISECONDS, ONE, Unit, byte_unit, format_deviations, format_numbers
from harness.report.view import View
from harness.util.text import sanitize

Config = dict[str, Any]

_FOLDER = Path(__file__).parent / "page"

_LONG = 36  # characters from which on a cell may wrap

_TEXTS = ("strategy", "checkpointing", "status", "precision", "engine", "model", "measured_on")

_MEMORY = ("peak_allocated_bytes", "state_bytes", *STATE_COLUMNS, "activation_bytes")

_COUNTS = (
    *("parameters", "world_size", "micro_batch", "global_batch", "seq_len"),
    *("tp", "cp", "pp", "dp_shard", "dp_replicate"),
)


@dataclass(frozen=True)
class ExplorerData:
    """The data of the chart whose axes the reader chooses: the texts and numbers of every row, by their names."""

    rows: Sequence[Mapping[str, str | float | None]]  # each has `label` and `strategy` too; an unknown number is None
    texts: Mapping[str, str]  # to color by: name and title
    numbers: Mapping[str, str]  # to draw: name, and title with the unit of the rows' values
    table: Table  # the same values, for readers who do not see the chart


def build_explorer(view: View) -> ExplorerData | None:
    """Return the lines with every number that at least two of them have; None if there are no two such numbers."""
    table = view.line_medians
    numbers: dict[str, str] = {}
    columns: dict[str, list[float | None]] = {}
    shown: dict[str, list[str]] = {}
    for name, title, unit in _numbers(table) if len(table) else ():
        values = column_values(table, name)
        if sum(value is not None for value in values) > 1:
            numbers[name] = f"{title}, {unit.name}" if unit.name else title
            columns[name] = [None if value is None else value / unit.size for value in values]
            shown[name] = format_deviations(values) if name.endswith("_deviation") else format_numbers(values, unit)
    if len(numbers) < 2:
        return None
    texts = {name: column(name).title for name in _TEXTS if name == "strategy" or len(distinct_values(table, name)) > 1}
    labels, strategies = column_values(table, "label"), [value or "" for value in column_values(table, "strategy")]
    cells_of = {name: [sanitize(value or "") for value in column_values(table, name)] for name in texts}
    rows: list[dict[str, str | float | None]] = []
    for i, label in enumerate(labels):
        row_texts = {name: values[i] for name, values in cells_of.items()}
        rows.append({"label": sanitize(label), **row_texts, **{name: values[i] for name, values in columns.items()}})
    others = [name for name in texts if name != "strategy"]  # the label says the strategy
    header = ["run", *(texts[name] for name in others), *numbers.values()]
    cells = [
        [labels[i], *(cells_of[n][i] for n in others), *(shown[n][i] for n in numbers)] for i in range(len(labels))
    ]
    value_table = Table(header, cells, 1 + len(others), "Everything that can be drawn", strategies)
    return ExplorerData(rows, texts, numbers, value_table)


def _numbers(table: Any) -> Iterator[tuple[str, str, Unit]]:
    """Yield every number that can be an axis: its column, its title and its unit."""
    memory = byte_unit([value for name in _MEMORY for value in column_values(table, name)])
    sent = byte_unit(column_values(table, "communication_bytes"))
    yield "tokens_per_second", "tokens a second", ONE
    yield (
        "peak_allocated_bytes",
        column("peak_allocated_bytes").title,
        memory,
    )  # the second is the initial horizontal axis
    yield "tokens_per_second_per_device", "tokens a second and device", ONE
    yield "step_seconds", "step time", MILLISECONDS
    yield "mfu", "MFU", Unit("%", 0.01)
    yield "pipeline_bubble", "bubble", ONE
    yield "state_bytes", "model state", memory
    yield from ((name, column(name).title, memory) for name in (*STATE_COLUMNS, "activation_bytes"))
    yield "communication_bytes", "sent by one rank in one step", sent
    yield "loss_deviation", "largest difference of a loss", ONE
    yield "grad_deviation", "largest difference of a gradient", ONE
    yield from ((name, column(name).title, ONE) for name in _COUNTS if len(distinct_values(table, name)) > 1)


@dataclass(frozen=True)
class _Heading:
    """A section with its id and level in the page."""

    id: str
    level: int
    section: Section
    inner: list["_Heading"] = field(default_factory=list)


def page(
    title: str,
    sections: Sequence[Section],
    explorer: ExplorerData | None,
    library: str,
    config: tuple[Config, Config],
    svgs: Mapping[str, str] | None = None,
) -> str:
    """Return the whole page.

    Args:
        title: The heading of the page.
        sections: The report.
        explorer: The data of the chart whose axes the reader chooses, if there is one.
        library: A script that sets `vegaEmbed`.
        config: The configs of Vega-Lite for light and dark pages.
        svgs: Charts as SVG by their names, which are shown where scripts are off.
    """
    headings = _headings(sections, 2, {"top", "main", "contents", "axes", "filter"})
    charts = list(_charts(sections))
    strategies = _strategies(sections, charts, explorer)
    data = {
        "charts": [chart.spec | {"description": chart.alt_text} for chart in charts],
        "explorer": explorer and {"rows": explorer.rows, "texts": explorer.texts, "numbers": explorer.numbers},
        "config": config,
    }
    style, script = (_source(name) for name in ("page.css", "page.js"))
    library = _script(library)
    html = _template().render(
        title=title,
        headings=headings,
        explorer=explorer,
        positions={id(chart): position for position, chart in enumerate(charts)},
        svgs={name: _data_url(svg) for name, svg in (svgs or {}).items()},
        strategies=strategies,
        data=Markup(_json(data)),
        style=Markup(style),
        script=Markup(script),
        library=Markup(library),
        # Vega interprets its expressions (`ast: true` in page.js), so no 'unsafe-eval' is needed.
        policy="; ".join(
            (
                "default-src 'none'",
                f"style-src {_digest(style)}",
                f"script-src {_digest(script)} {_digest(library)}",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
    )
    return html.lstrip()


def _headings(sections: Sequence[Section], level: int, used_ids: set[str]) -> list[_Heading]:
    """Return the sections with ids made from their titles, of which no two are the same."""
    headings: list[_Heading] = []
    for section in sections:
        slug = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")[:40].strip("-") or "section"
        name, count = slug, 1
        while name in used_ids:
            count += 1
            name = f"{slug}-{count}"
        used_ids.add(name)
        headings.append(_Heading(name, min(level, 6), section, _headings(section.inner, level + 1, used_ids)))
    return headings


def _charts(sections: Sequence[Section]) -> Iterator[Chart]:
    for section in sections:
        yield from (part for part in section.parts if isinstance(part, Chart))
        yield from _charts(section.inner)


def _tables(sections: Sequence[Section]) -> Iterator[Table]:
    for section in sections:
        for part in section.parts:
            if isinstance(part, Table | Chart):
                yield part if isinstance(part, Table) else part.table
        yield from _tables(section.inner)


def _strategies(sections: Sequence[Section], charts: Sequence[Chart], explorer: ExplorerData | None) -> list[str]:
    """Return every strategy that a row or a mark belongs to, in the order of the page."""
    tables = [*_tables(sections), *([explorer.table] if explorer else [])]
    strategies = [strategy for table in tables for strategy in table.strategies]
    strategies += [strategy for chart in charts for strategy in _strategies_in(chart.spec)]
    return list(dict.fromkeys(strategy for strategy in strategies if strategy))


def _strategies_in(spec: Any) -> Iterator[str]:
    """Yield the strategies in a chart's data, at any depth."""
    if isinstance(spec, dict):
        if isinstance(spec.get("strategy"), str):
            yield spec["strategy"]
        else:
            for value in spec.values():
                yield from _strategies_in(value)
    elif isinstance(spec, list | tuple):
        for value in spec:
            yield from _strategies_in(value)


def _json(data: Any) -> str:
    """Return JSON for a script element: none of its text ends the element or begins a comment."""
    return json.dumps(data, allow_nan=False, default=str).replace("<", "\\u003c")


def _script(text: str) -> str:
    """Return a script as an element's text, with the line ends that a parser of HTML makes: the digest covers them."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data_url(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode('utf-8', 'replace')).decode()}"


@cache
def _source(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else sanitize(value),
    )
    environment.filters |= {"split_cell": _split_cell, "identity": id}
    for kind in (Paragraph, BulletList, Table, Chart, Best):
        environment.tests[kind.__name__.lower()] = lambda value, kind=kind: isinstance(value, kind)
    environment.tests["long"] = lambda text: len(text) > _LONG
    return environment.get_template("page.html.j2")


def _split_cell(text: str) -> tuple[str, str]:
    """Return a number and the mark behind it, which hangs to its right so that numbers are aligned."""
    return (text[:-1], "~") if text.endswith("~") else (text, "")
