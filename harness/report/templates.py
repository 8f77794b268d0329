"""The templates of the pages, in which every text is escaped as the page's language needs it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from harness.report.document import Banner, Best, BulletList, Chart, Disturbed, MemorySlider, Paragraph, Table

FOLDER = Path(__file__).parent / "page"

_KINDS = (Banner, Paragraph, BulletList, Table, Chart, MemorySlider, Best, Disturbed)


def template(name: str, escape: Callable[[Any], str], **filters: Callable[..., Any]) -> jinja2.Template:
    """Return a template of a page, which may ask for the kind of a part or of a cell.

    Args:
        name: The file of the template.
        escape: What is done to all text; what is no Markup then, is escaped for HTML as well.
        filters: The template's own filters.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(value),
    )
    environment.filters |= {"json": lambda value: json.dumps(value, allow_nan=False)} | filters
    environment.tests |= {kind.__name__.lower(): lambda value, kind=kind: isinstance(value, kind) for kind in _KINDS}
    return environment.get_template(name)
