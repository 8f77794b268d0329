"""The page of a search of layouts: memory against speed, what fits which device, and what separates the fastest.

It has the look and the parts of report.html, and loads nothing; as Markdown it has its chart and its rows beside it.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.byte_size import format_bytes
from harness.cost_model.prediction import Prediction
from harness.planner.explain import explanation
from harness.planner.plan import LayoutPlan
from harness.planner.row import csv_text, planned_row
from harness.planner.run_overrides import run_overrides
from harness.planner.search import SearchResult
from harness.planner.sentences import (
    basis_sentences,
    error_sentences,
    memory_sentences,
    misfit_sentences,
    parts_of_step,
    run_sentences,
    say,
    separation,
)
from harness.records.schema import Row
from harness.report import html, markdown
from harness.report.charts import render
from harness.report.charts.front import GIB, front_chart, front_sentence
from harness.report.document import BulletList, MemorySlider, Paragraph, Section, Table, bullets, section
from harness.report.sentences import sentence
from harness.util.files import atomic_write_text

_WITHOUT_CHARTS = "the page has no chart"

ROWS = "plans.csv"  # the rows of the best layouts and of the front, beside a page of Markdown

Cell = Callable[[Prediction], str]  # of a table of plans

_FRONT: dict[str, Cell] = {
    "layout": Prediction.label,
    "GiB of a device": lambda entry: f"{entry.needed_bytes / GIB:.1f}",
    "fits": lambda entry: entry.verdict.fits,
    "step s": lambda entry: f"{entry.step_seconds:.4g}",
    "tokens/s": lambda entry: f"{entry.tokens_per_second:,.0f}",
}
_OF_RUNS: dict[str, Cell] = {"overrides of its run": lambda entry: shlex.join(run_overrides(entry.config))}
_SPEEDS: dict[str, Cell] = {
    "tokens/s": _FRONT["tokens/s"],
    "tokens/s of a device": lambda entry: f"{entry.tokens_per_second / entry.layout.world_size:,.0f}",
    "MFU %": lambda entry: "" if entry.mfu is None else f"{100 * entry.mfu:.1f}",
}
_MEMORY: dict[str, Cell] = {
    "peak GiB": lambda entry: f"{entry.memory.peak_bytes / GIB:.1f}",
    "reserved GiB": lambda entry: f"{entry.peak.reserved_bytes / GIB:.1f}" if entry.cluster.device == "cuda" else "",
    "fits": _FRONT["fits"],
    "fullest rank": lambda entry: str(entry.memory.rank),
    "phase of its peak": lambda entry: entry.memory.phase,
}


def write_page(page: Path, plan: LayoutPlan, result: SearchResult, overrides: Sequence[str]) -> None:
    """Write the page of a search by these overrides, as HTML or as Markdown by its suffix.

    Beside a page of Markdown stand its chart, in a folder `figures`, and the rows that it shows, in `plans.csv`.
    """
    entries = result.best or result.front
    device = f"{entries[0].layout.world_size} devices of {entries[0].cluster.name}" if entries else ""
    name = f"Plan: {entries[0].config.model.name} on {device}" if entries else "Plan"
    sections = [*_sections(plan, result), _commands(plan, result, overrides)]
    page.parent.mkdir(parents=True, exist_ok=True)
    if page.suffix == ".html":
        library = ""
        with render.failure_told(_WITHOUT_CHARTS):
            library = render.library()
        atomic_write_text(page, html.page(name, sections, None, library, rows=_data(result)))
    else:
        atomic_write_text(page.parent / ROWS, csv_text(_rows(result)))
        markdown.write(page, name, sections, _WITHOUT_CHARTS)


def _data(result: SearchResult) -> dict[str, Any]:
    """Return the rows of the best layouts and of the front, and how many layouts the search saw."""
    counts = {name: getattr(result, name) for name in ("considered", "beyond", "valid", "memory_estimates")}
    rows = {"best": [planned_row(entry) for entry in result.best], "front": [planned_row(e) for e in result.front]}
    return rows | counts


def _rows(result: SearchResult) -> list[Row]:
    """Return a row for each of the best layouts and of those on the front, each once, with its places."""
    entries = {id(entry): entry for entry in (*result.best, *result.front)}
    best, front = ({id(entry): place for place, entry in enumerate(shown, 1)} for shown in (result.best, result.front))
    return [
        {"place_among_best": best.get(key), "place_on_front": front.get(key)} | planned_row(entry)
        for key, entry in entries.items()
    ]


def _sections(plan: LayoutPlan, result: SearchResult) -> list[Section]:
    """Return the sections of the page; only those that have something to say."""
    best, front = result.best, result.front
    (answer,) = section("Answer", *map(Paragraph, _answer(result)), front_chart(front))
    sections = [replace(answer, is_first=True)]
    if front:
        size = format_bytes(front[0].memory.process_bytes)
        shown = _FRONT | (_OF_RUNS if front[0].is_runnable else {})
        outside = Paragraph(sentence("outside_the_peak", size=size))
        table = _table(shown, front, "The front, the fastest first")
        sections += section("Which layouts fit", outside, _slider(front), table)
    if best:
        separations = [separation(entry, best[0]) for entry in best[1:]]
        sections += section("The fastest that fit", _best_table(best), bullets(separations))
    sections += section("With less memory", bullets(memory_sentences(result)))
    sections += section("What would make others fit", bullets(misfit_sentences(result)))
    sections += section("How it was found", bullets([say("counts", result=result), *plan.notes]))
    if arithmetic := bullets(line for entry in best[:1] for line in explanation(entry)):
        sections.append(Section("The arithmetic of the fastest", [arithmetic], is_folded=True))
    return sections


def _answer(result: SearchResult) -> Iterator[str]:
    """Yield what was planned, the fastest that fits and the front, and what the predictions are worth."""
    for entry in (result.best or result.front)[:1]:
        device, ranks = entry.cluster.hardware.device_name, entry.layout.world_size
        yield sentence("planned_settings", config=entry.config, device=device, ranks=ranks, stack=entry.stack.name)
    if result.best:
        first = result.best[0]
        yield sentence("fastest_plan", entry=first, interval=first.step_interval, share=first.mfu, gib=GIB)
    else:
        yield sentence("no_plan")
    yield front_sentence(result.front)
    for entry in (result.best or result.front)[:1]:
        yield from (*error_sentences(entry), *basis_sentences(entry))
        if entry.stack.memory.kind == "harness" and entry.cluster.device == "cuda":
            yield sentence("unmeasured_plan")


def _slider(front: Sequence[Prediction]) -> MemorySlider:
    """Return the slider over the front, which starts at the memory of the devices."""
    entries = [(entry.needed_bytes / GIB, entry.label(), entry.tokens_per_second) for entry in front]
    device = front[0].available_bytes / GIB
    fitting = [entry for entry in entries if entry[0] <= device]
    return MemorySlider(device, entries, sentence("slider_start", device_gib=device, fitting=fitting, entries=entries))


def _table(columns: dict[str, Cell], entries: Sequence[Prediction], caption: str) -> Table:
    return Table(list(columns), [[cell(entry) for cell in columns.values()] for entry in entries], caption=caption)


def _best_table(best: Sequence[Prediction]) -> Table:
    """Return the fastest layouts that fit, with what their steps and their memory consist of."""
    seconds = {id(entry): parts_of_step(entry) for entry in best}
    parts: dict[str, Cell] = {
        f"{part} s": lambda entry, part=part: f"{seconds[id(entry)][part]:.4g}"  # type: ignore[misc]
        for part in seconds[id(best[0])]
        if any(of_entry[part] for of_entry in seconds.values())
    }
    columns = {name: _FRONT[name] for name in ("layout", "step s")} | parts | _SPEEDS | _MEMORY
    return _table(columns, best, "Their steps and their memory; the parts add up to the step")


def _commands(plan: LayoutPlan, result: SearchResult, overrides: Sequence[str]) -> Section:
    """Return the commands that plan this again and that run the fastest; of a sweep, the page has one search."""
    lines = [("The command of this plan", shlex.join(["harness", "plan", *overrides]))]
    lines += [("This search of it", plan.swept)] if plan.swept else []
    lines += [("", line) for line in run_sentences(plan.overrides, result)]
    return Section("How to plan it again, and to run it", [BulletList(lines)])
