"""The files of a search: a page for the browser, or a page of Markdown with its chart and its rows beside it."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.planner.plan import LayoutPlan
from harness.planner.row import csv_text, planned_row
from harness.planner.search import SearchResult
from harness.planner.sentences import run_sentences
from harness.records.schema import Row
from harness.report import markdown, plan_page
from harness.report.charts import render
from harness.report.document import BulletList, MemorySlider, Paragraph, Section, charts
from harness.util.files import atomic_write_text

ROWS = "plans.csv"  # the rows of the best layouts and of the front, beside a page of Markdown


def write_page(page: Path, plan: LayoutPlan, result: SearchResult, overrides: Sequence[str]) -> None:
    """Write the page of a search by these overrides, as HTML or as Markdown by its suffix.

    Beside a page of Markdown stand its chart, in a folder `figures`, and the rows that it shows, in `plans.csv`.
    """
    name = plan_page.title(result)
    sections = [*plan_page.plan_sections(plan, result), command_section(plan, result, overrides)]
    page.parent.mkdir(parents=True, exist_ok=True)
    if page.suffix == ".html":
        atomic_write_text(page, plan_page.html_page(result, name, sections))
        return
    drawn = render.drawn(charts(sections), "the page has no chart")
    if drawn:
        folder = page.parent / markdown.FIGURES
        folder.mkdir(exist_ok=True)
        for figure, text in drawn.items():
            atomic_write_text(folder / f"{figure}.svg", text)
    atomic_write_text(page.parent / ROWS, csv_text(rows_of_search(result)))
    atomic_write_text(page, markdown.page(name, [as_read(section) for section in sections], drawn))


def command_section(plan: LayoutPlan, result: SearchResult, overrides: Sequence[str]) -> Section:
    """Return the commands that plan this again and that run the fastest; of a sweep, the page has one search."""
    lines = [("The command of this plan", shlex.join(["harness", "plan", *overrides]))]
    lines += [("This search of it", plan.swept)] if plan.swept else []
    lines += [("", line) for line in run_sentences(plan.overrides, result)]
    return Section("How to plan it again, and to run it", [BulletList(lines)])


def as_read(section: Section) -> Section:
    """Return a section for readers without scripts, in which a slider is what it says at its start."""
    parts = [Paragraph(start_of(part)) if isinstance(part, MemorySlider) else part for part in section.parts]
    return Section(section.title, parts, [as_read(inner) for inner in section.inner])


def start_of(slider: MemorySlider) -> str:
    """Return what a slider says of the memory of the devices."""
    return f"In the {slider.device_gib:.1f} GiB of a device {slider.text.partition(': ')[2]}"


def rows_of_search(result: SearchResult) -> list[Row]:
    """Return a row for each of the best layouts and of those on the front, each once, with its places."""
    entries = {id(entry): entry for entry in (*result.best, *result.front)}
    best, front = ({id(entry): place for place, entry in enumerate(shown, 1)} for shown in (result.best, result.front))
    return [
        {"place_among_best": best.get(key), "place_on_front": front.get(key)} | planned_row(entry)
        for key, entry in entries.items()
    ]
