"""report.html: the report as one file that fetches nothing, for any browser, a phone and paper.

Text, tables and sentences are in the HTML and read without scripts; page/page.js adds sorting, filters and charts.
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

from harness.report.document import Best, BulletList, Chart, Paragraph, Section, Table
from harness.report.frame import column_values, distinct_values
from harness.report.text import MILLISECONDS, ONE, Unit, byte_unit, format_deviations, format_numbers
from harness.report.view import View
from harness.util.text import sanitize

Config = dict[str, Any]

_FOLDER = Path(__file__).parent / "page"

_LONG = 36  # letters of a cell that does not have to stay on one line

_WORDS = {"strategy": "strategy", "checkpointing": "checkpointing", "status": "status", "precision": "precision"}

_WORDS |= {"engine": "engine", "model": "model", "measured_on": "device"}

_MEMORY = {
    "peak_allocated_bytes": "peak memory",
    "state_bytes": "model state",
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activation_bytes": "activations",
}

_COUNTS = {
    "parameters": "model parameters",
    "world_size": "world size",
    "micro_batch": "micro-batch",
    "global_batch": "global batch",
    "seq_len": "sequence length",
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "dp_shard": "dp_shard",
    "dp_replicate": "dp_replicate",
}


@dataclass(frozen=True)
class ExplorerData:
    """What the reader draws: of every row its words and numbers, which may be None, by the names of both."""

    rows: Sequence[Mapping[str, str | float | None]]  # each has `label` and `strategy` besides
    words: Mapping[str, str]  # to colour by: name and title
    numbers: Mapping[str, str]  # to draw: name, and title with the unit that the rows' values are in
    table: Table  # the same values, for those who do not see the chart


def build_explorer(view: View) -> ExplorerData | None:
    """The lines of a folder by every number that two of them know; None where there are no two such numbers."""
    table = view.line_medians
    numbers: dict[str, str] = {}
    columns: dict[str, list[float | None]] = {}
    shown: dict[str, list[str]] = {}
    for name, title, unit in _numbers(table) if len(table) else ():
        found = column_values(table, name)
        if sum(value is not None for value in found) > 1:
            numbers[name] = f"{title}, {unit.name}" if unit.name else title
            columns[name] = [None if value is None else value / unit.size for value in found]
            shown[name] = format_deviations(found) if name.endswith("_deviation") else format_numbers(found, unit)
    if len(numbers) < 2:
        return None
    words = {
        name: title for name, title in _WORDS.items() if name == "strategy" or len(distinct_values(table, name)) > 1
    }
    labels, strategies = column_values(table, "label"), [value or "" for value in column_values(table, "strategy")]
    texts = {name: [sanitize(value or "") for value in column_values(table, name)] for name in words}
    rows: list[dict[str, str | float | None]] = []
    for i, label in enumerate(labels):
        said = {name: values[i] for name, values in texts.items()}
        rows.append({"label": sanitize(label), **said, **{name: values[i] for name, values in columns.items()}})
    told = [name for name in words if name != "strategy"]  # the label says the strategy
    header = ["run", *(words[name] for name in told), *numbers.values()]
    cells = [[labels[i], *(texts[n][i] for n in told), *(shown[n][i] for n in numbers)] for i in range(len(labels))]
    grid = Table(header, cells, 1 + len(told), "Everything that can be drawn", strategies)
    return ExplorerData(rows, words, numbers, grid)


def _numbers(table: Any) -> Iterator[tuple[str, str, Unit]]:
    """Every number that can be an axis: its column, title and the unit of it that reads well."""
    memory = byte_unit([value for name in _MEMORY for value in column_values(table, name)])
    sent = byte_unit(column_values(table, "communication_bytes"))
    yield "tokens_per_second", "tokens a second", ONE
    yield "peak_allocated_bytes", "peak memory", memory  # the second is what is drawn across at first
    yield "tokens_per_second_per_device", "tokens a second and device", ONE
    yield "step_seconds", "step time", MILLISECONDS
    yield "mfu", "MFU", Unit("%", 0.01)
    yield "bubble", "bubble", ONE
    yield from ((name, title, memory) for name, title in _MEMORY.items() if name != "peak_allocated_bytes")
    yield "communication_bytes", "sent by one rank in one step", sent
    yield "loss_deviation", "largest difference of a loss", ONE
    yield "grad_deviation", "largest difference of a gradient", ONE
    yield from ((name, title, ONE) for name, title in _COUNTS.items() if len(distinct_values(table, name)) > 1)


@dataclass(frozen=True)
class _Heading:
    """A section with its place in the page."""

    id: str
    level: int
    section: Section
    inner: list["_Heading"] = field(default_factory=list)


def page(
    title: str,
    sections: Sequence[Section],
    explored: ExplorerData | None,
    library: str,
    config: tuple[Config, Config],
    svgs: Mapping[str, str] | None = None,
) -> str:
    """The whole file.

    library: a script that sets `vegaEmbed`. config: Vega-Lite's, light and dark. svgs: of pictures by
    their names, shown where scripts are off.
    """
    headings = _headings(sections, 2, {"top", "main", "contents", "axes", "filter"})
    pictures = list(_pictures(sections))
    strategies = _strategies(sections, pictures, explored)
    data = {
        "charts": [picture.spec | {"description": picture.alt_text} for picture in pictures],
        "explored": explored and {"rows": explored.rows, "words": explored.words, "numbers": explored.numbers},
        "config": config,
    }
    style, script = (_source(name) for name in ("page.css", "page.js"))
    library = _script(library)
    made = _template().render(
        title=title,
        headings=headings,
        explored=explored,
        positions={id(picture): position for position, picture in enumerate(pictures)},
        svgs={name: _address(svg) for name, svg in (svgs or {}).items()},
        strategies=strategies,
        data=Markup(_json(data)),
        style=Markup(style),
        script=Markup(script),
        library=Markup(library),
        # Vega evaluates its expressions by an interpreter (`ast: true` in page.js), so that no 'unsafe-eval' is needed.
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
    return made.lstrip()


def _headings(sections: Sequence[Section], level: int, taken: set[str]) -> list[_Heading]:
    """The sections with ids made from their titles, no two the same."""
    found: list[_Heading] = []
    for section in sections:
        slug = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")[:40].strip("-") or "section"
        name, count = slug, 1
        while name in taken:
            count += 1
            name = f"{slug}-{count}"
        taken.add(name)
        found.append(_Heading(name, min(level, 6), section, _headings(section.inner, level + 1, taken)))
    return found


def _pictures(sections: Sequence[Section]) -> Iterator[Chart]:
    for section in sections:
        yield from (part for part in section.parts if isinstance(part, Chart))
        yield from _pictures(section.inner)


def _grids(sections: Sequence[Section]) -> Iterator[Table]:
    for section in sections:
        for part in section.parts:
            if isinstance(part, Table | Chart):
                yield part if isinstance(part, Table) else part.table
        yield from _grids(section.inner)


def _strategies(sections: Sequence[Section], pictures: Sequence[Chart], explored: ExplorerData | None) -> list[str]:
    """Every strategy that a row or a mark belongs to, in the order of the page."""
    grids = [*_grids(sections), *([explored.table] if explored else [])]
    found = [strategy for grid in grids for strategy in grid.strategies]
    found += [strategy for picture in pictures for strategy in _marked(picture.spec)]
    return list(dict.fromkeys(strategy for strategy in found if strategy))


def _marked(spec: Any) -> Iterator[str]:
    """The strategies in a chart's data, wherever in it they stand."""
    if isinstance(spec, dict):
        if isinstance(spec.get("strategy"), str):
            yield spec["strategy"]
        else:
            for value in spec.values():
                yield from _marked(value)
    elif isinstance(spec, list | tuple):
        for value in spec:
            yield from _marked(value)


def _json(data: Any) -> str:
    """JSON that may stand in a script element: none of its text ends the element or begins a comment."""
    return json.dumps(data, allow_nan=False, default=str).replace("<", "\\u003c")


def _script(text: str) -> str:
    """A script as an element's text; a parser of HTML changes line ends, and with them the digest."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _address(svg: str) -> str:
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
    """A number and the mark behind it, which hangs to its right so that numbers stand under each other."""
    return (text[:-1], "~") if text.endswith("~") else (text, "")
