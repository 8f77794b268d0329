"""The page of a search of layouts: memory against speed, what fits which device, and what separates the fastest.

It has the look and the parts of report.html, and loads nothing; as Markdown it has its chart and its rows beside it.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.cost_model.prediction import Prediction
from harness.layout.layout import Layout
from harness.planner.plan import LayoutPlan
from harness.planner.row import csv_text, planned_row, run_overrides
from harness.planner.search import SearchResult
from harness.planner.sentences import (
    basis_sentences,
    choice_sentences,
    explanation,
    layout_sentences,
    misfit_sentences,
    say,
    separations,
)
from harness.records.schema import Row
from harness.report import html, markdown
from harness.report.charts import render, style
from harness.report.charts.marks import Plot, axis, draw, palette, single
from harness.report.charts.rows import Field, Rows, figures
from harness.report.document import BulletList, Chart, MemorySlider, Paragraph, Section, Table, bullets, section
from harness.report.lines import Item
from harness.report.text import sentence
from harness.report.view import View
from harness.util.files import atomic_write_text
from harness.util.text import format_bytes

_WITHOUT_CHARTS = "the page has no chart"

ROWS = "plans.csv"  # the rows of the best layouts and of the front, beside a page of Markdown


def write_page(page: Path, plan: LayoutPlan, result: SearchResult, overrides: Sequence[str]) -> None:
    """Write the page of a search by these overrides, as HTML or as Markdown by its suffix.

    Beside a page of Markdown stand its chart, in a folder `figures`, and the rows that it shows, in `plans.csv`.
    """
    name = sentence("plan_title", entry=next(iter(result.best or result.device_front), None))
    sections = [*_sections(plan, result, overrides)]
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
    """Return the rows of the choices and of the front, and how many layouts the search saw."""
    counts = {name: getattr(result, name) for name in ("considered", "beyond", "valid", "memory_estimates")}
    return {
        "choices": list(map(planned_row, result.choices)),
        "front": list(map(planned_row, result.device_front)),
    } | counts


def _rows(result: SearchResult) -> list[Row]:
    """Return a row for each of the choices and of the layouts on the front, each once, with its places."""
    lists = (result.choices, result.device_front)
    entries = {entry.label(): entry for shown in lists for entry in shown}
    choices, front = ({entry.label(): place for place, entry in enumerate(shown, 1)} for shown in lists)
    return [
        {"place_among_choices": choices.get(key), "place_on_front": front.get(key)} | planned_row(entry)
        for key, entry in entries.items()
    ]


def _sections(plan: LayoutPlan, result: SearchResult, overrides: Sequence[str]) -> Iterator[Section]:
    """Yield the sections of the page; only those that have something to say."""
    choices, front = result.choices, result.device_front
    answer = map(Paragraph, _answer(plan, result))
    yield from section("Answer", *answer, front_chart(front), is_first=True)
    yield from section("Choices", *(_choices(choices) if choices else ()))
    yield from section("With more memory, or another batch", bullets(misfit_sentences(result)))
    yield from section("Which layouts fit", *(_front(front) if front else ()))
    search = [say("counts", result=result), *layout_sentences(result), *plan.notes]
    yield from section("How it was found", bullets(search))
    arithmetic = bullets(explanation(choices[0])) if choices else None
    yield from section("The arithmetic of the fastest", arithmetic, is_folded=True)
    swept = [("This search of it", plan.swept)] if plan.swept else []
    command = ("The command of this plan", shlex.join(["harness", "plan", *overrides]))
    yield Section("How to plan it again", [BulletList([command, *swept])])


def _answer(plan: LayoutPlan, result: SearchResult) -> Iterator[str]:
    """Yield what the search decides, what was planned, the front, and what the predictions rest on."""
    yield from choice_sentences(result, plan.overrides, plan.tokens)
    for entry in (result.choices or result.device_front)[:1]:
        yield sentence("planned_settings", entry=entry)
        yield from basis_sentences(entry)
        if entry.is_runnable and entry.cluster.device == "cuda":
            yield sentence("unmeasured_plan")
    yield sentence("front_chart", front=result.device_front)


def _front(front: Sequence[Prediction]) -> tuple[Paragraph, MemorySlider, Table]:
    """Return what is outside the peak, the slider, which starts at the memory of the devices, and the layouts."""
    outside = Paragraph(sentence("outside_the_peak", size=format_bytes(front[0].memory.process_bytes)))
    entries = [(entry.device_bytes / GIB, entry.label(), entry.tokens_per_second) for entry in front]
    device = front[0].available_bytes / GIB
    fitting = [entry for entry in entries if entry[0] <= device]
    start = sentence("slider_start", device_gib=device, fitting=fitting, entries=entries)
    table = _table(
        [_front_row(entry) for entry in front], "Layouts that are faster than all with less memory, the fastest first"
    )
    return outside, MemorySlider(device, entries, start), table


def _choices(choices: Sequence[Prediction]) -> tuple[Table, BulletList | None]:
    """Return the choices, without parts of a step that none of them has, and what separates them."""
    parts = [name for name in choices[0].parts_of_step if any(entry.parts_of_step[name] for entry in choices)]
    rows = [_choice_row(entry, parts) for entry in choices]
    table = _table(rows, "Their steps and their memory; the parts add up to the step")
    return table, bullets(separations(choices))


def _table(rows: Sequence[Mapping[str, str]], caption: str) -> Table:
    return Table(list(rows[0]), [list(row.values()) for row in rows], caption=caption)


def _front_row(entry: Prediction) -> dict[str, str]:
    """Return the cells of a layout on the front, with its run's overrides if it can be run."""
    row = {
        "layout": entry.label(),
        "GiB of a device": f"{entry.device_bytes / GIB:.1f}",
        "fits": entry.verdict.fits,
        "step s": f"{entry.step_seconds:.4g}",
        "tokens/s": f"{entry.tokens_per_second:,.0f}",
    }
    return row | ({"overrides of its run": shlex.join(run_overrides(entry.config))} if entry.is_runnable else {})


def _choice_row(entry: Prediction, parts: Sequence[str]) -> dict[str, str]:
    """Return the cells of one of the choices: what its step, by parts, and its memory consist of."""
    front, seconds = _front_row(entry), entry.parts_of_step
    return {
        "layout": front["layout"],
        "step s": front["step s"],
        **{f"{part} s": f"{seconds[part]:.4g}" for part in parts},
        "tokens/s": front["tokens/s"],
        "tokens/s of a device": f"{entry.tokens_per_second / entry.layout.world_size:,.0f}",
        "MFU %": "" if entry.mfu is None else f"{100 * entry.mfu:.1f}",
        "allocated GiB": f"{entry.memory.peak_bytes / GIB:.1f}",
        "reserved GiB": f"{entry.reserved_bytes / GIB:.1f}" if entry.cluster.device == "cuda" else "",
        "fits": front["fits"],
        "fullest rank": str(entry.memory.rank),
        "phase of its peak": entry.memory.phase,
    }


GIB = 2**30


def front_chart(front: Sequence[Prediction]) -> Chart | None:
    """Draw the front, with the memory of the devices; None where there is nothing to draw."""
    if not front:
        return None
    kinds = [_kind(entry.layout) for entry in front]
    fields = {
        "x": figures("GiB of a device", [entry.device_bytes / GIB for entry in front], ",.1f"),
        "y": figures("tokens/s", [entry.tokens_per_second for entry in front], ",.0f"),
        "kind": Field("model state", kinds),
    }
    rows = Rows([Item(entry.label(), "", place) for place, entry in enumerate(front)], fields, "layout")
    x, y = axis("memory that a device must have (GiB)"), axis("tokens per second (higher is better)")
    plot, limit = Plot(View("plan", []), rows, x, y), front[0].available_bytes / GIB
    layers = [
        plot.mark("line front", order={"field": "x", "type": "quantitative"}),
        plot.mark("rule limit", "limit", None, data="limits"),
        plot.mark("text corner", "limit", {"value": 0}, data="limits", text="shown"),
        plot.mark("point", color=palette("kind", style.strategy_colors(kinds), {"orient": "bottom"})),
    ]
    return draw(
        plot.view,
        "front",
        "Memory and speed",
        rows,
        "",
        single(layers),
        facts={"front": front},
        data={"limits": [{"strategy": "", "limit": limit, "shown": f"a device: {limit:.1f} GiB"}]},
        subtitle=[f"{front[0].config.model.name} on {front[0].layout.world_size} devices of {front[0].cluster.name}"],
    )


def _kind(layout: Layout) -> str:
    """Return how a layout shares model state among data-parallel ranks, in two words."""
    whole = "replicas" if layout.dp > 1 else "no data parallelism"
    return f"ZeRO-{layout.zero_stage}" if layout.zero_stage else whole
