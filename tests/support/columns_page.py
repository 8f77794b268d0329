"""The reference page of all columns, generated from the registry."""

from harness.records.columns import COLUMNS, Group
from tests.support.page_templates import render_page

GROUP_TITLES: dict[Group, str] = {
    "run": "Run",
    "model": "Model",
    "layout": "Strategy and layout",
    "batch": "Batch",
    "options": "Options",
    "outcome": "Outcome of runs that did not end ok",
    "training": "Training",
    "time": "Time",
    "throughput": "Throughput",
    "memory": "Memory",
    "bytes": "Communication",
}


def columns_page() -> str:
    """Return the reference page of all columns as Markdown, docs/reference/columns.md."""
    groups = {title: [column for column in COLUMNS if column.group == group] for group, title in GROUP_TITLES.items()}
    return render_page("columns", groups=groups)
