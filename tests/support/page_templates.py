"""Pages of the documentation that are made of templates."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=False, keep_trailing_newline=True
)


def render_page(name: str, **values: object) -> str:
    """Return a page by its template."""
    return ENVIRONMENT.get_template(f"{name}.md.jinja").render(**values)
