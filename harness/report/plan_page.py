"""The sections of a search of layouts: memory against speed, what fits which device, and what separates the fastest.

Its page has the look and the parts of report.html, and loads nothing.
"""

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from harness.config.byte_size import format_bytes
from harness.config.strategy import AXES
from harness.cost_model.prediction import Prediction
from harness.planner.explain import explanation
from harness.planner.plan import LayoutPlan
from harness.planner.row import planned_row
from harness.planner.run_overrides import run_overrides
from harness.planner.search import SearchResult
from harness.planner.sentences import (
    basis_sentences,
    count_sentence,
    error_sentences,
    memory_sentences,
    misfit_sentences,
    separation,
)
from harness.report import html
from harness.report.charts import render, style
from harness.report.charts.front import GIB, front_chart, front_sentence
from harness.report.document import MemorySlider, Paragraph, Section, Table, bullets, section
from harness.util.text import sanitize

FITS = {"likely": "is likely to fit", "tight": "is tight", "no": "does not fit"}  # a verdict in a sentence


def html_page(result: SearchResult, name: str, sections: Sequence[Section]) -> str:
    """Return the page of a search for the browser. Without a library to draw them, it has no charts."""
    rows = {"best": [planned_row(entry) for entry in result.best], "front": [planned_row(e) for e in result.front]}
    counts = {name: getattr(result, name) for name in ("considered", "beyond", "valid", "memory_estimates")}
    try:
        library = render.library()
    except render.DrawingError as error:
        print(f"the page has no chart: {sanitize(error)}", file=sys.stderr)
        library = ""
    return html.page(name, sections, None, library, (style.config(), style.config(dark=True)), rows=rows | counts)


def title(result: SearchResult) -> str:
    """Return the title of the page: the model, and the devices that it is planned for."""
    entry = (result.best or result.front)[:1]
    if not entry:
        return "Plan"
    (first,) = entry
    return f"Plan: {first.config.model.name} on {first.layout.world_size} devices of {first.cluster.name}"


def plan_sections(plan: LayoutPlan, result: SearchResult) -> list[Section]:
    """Return the sections of the page; only those that have something to say."""
    any_layout = (result.best or result.front)[:1]
    errors = [line for entry in any_layout for line in (*error_sentences(entry), *basis_sentences(entry))]
    answer: list[Any] = [Paragraph(line) for entry in any_layout for line in [settings_sentence(entry)]]
    answer += [Paragraph(best_sentence(result)), Paragraph(front_sentence(result.front))]
    answer += [Paragraph(line) for line in [*errors, *unmeasured(any_layout)]]
    chart = front_chart(result.front)
    sections = [Section("Answer", [*answer, *([chart] if chart else [])], is_first=True)]
    if result.front:
        outside = Paragraph(outside_sentence(result.front[0]))
        sections += section("Which layouts fit", outside, slider(result.front), front_table(result.front))
    if result.best:
        separations = [separation(entry, result.best[0]) for entry in result.best[1:]]
        sections += section("The fastest that fit", best_table(result.best), bullets(separations))
    sections += section("With less memory", bullets(memory_sentences(result)))
    sections += section("What would make others fit", bullets(misfit_sentences(result)))
    sections += section("How it was found", bullets([count_sentence(result), *plan.notes]))
    if arithmetic := bullets(line for entry in result.best[:1] for line in explanation(entry)):
        sections.append(Section("The arithmetic of the fastest", [arithmetic], is_folded=True))
    return sections


def settings_sentence(entry: Prediction) -> str:
    """Return what every layout of the search trains: model, devices, batch, precision and implementation."""
    config, cluster = entry.config, entry.cluster
    tokens = config.train.global_batch * config.train.seq_len
    return (
        f"Planned: {config.model.name}, with {config.model.parameters:,} parameters, on {entry.layout.world_size:,}"
        f" devices ({cluster.hardware.device_name}); a step trains {config.train.global_batch:,} sequences of"
        f" {config.train.seq_len:,} tokens, {tokens:,} in all, with precision={config.precision.name} and"
        f" stack={entry.stack.name}. Every figure is a prediction: nothing was run."
    )


def unmeasured(entries: Sequence[Prediction]) -> list[str]:
    """Return that plans of this project's own engines were not compared with GPUs, if these entries are such plans."""
    if not any(entry.stack.memory.kind == "harness" and entry.cluster.device == "cuda" for entry in entries):
        return []
    return [
        "No plan of this project's own engines has been compared with a run on GPUs: their peaks were measured on a"
        " CPU, with small models."
    ]


def outside_sentence(entry: Prediction) -> str:
    """Return what a device holds beside the peak."""
    size = format_bytes(entry.memory.process_bytes)
    return f"What a layout needs of a device is its peak and {size} outside torch's allocator, such as CUDA's context."


def best_sentence(result: SearchResult) -> str:
    """Return the fastest layout that fits, with its speed and its memory."""
    if not result.best:
        return "No layout of this model fits these devices."
    first = result.best[0]
    low, high = first.step_interval
    share = "" if first.mfu is None else f" and {100 * first.mfu:.1f} % of the devices' peak"
    return (
        f"The fastest that fits is {first.label()}: a step takes {first.step_seconds:.4g} s ({low:.3g} to {high:.3g}),"
        f" which is {first.tokens_per_second:,.0f} tokens/s{share}, in {gib(first):.1f} of the"
        f" {first.available_bytes / GIB:.1f} GiB of a device, which {FITS[first.verdict.fits]}."
    )


def gib(prediction: Prediction) -> float:
    """Return the memory that a device must have, in GiB."""
    return prediction.needed_bytes / GIB


def slider(front: Sequence[Prediction]) -> MemorySlider:
    """Return the slider over the front, which starts at the memory of the devices."""
    entries = [(gib(entry), entry.label(), entry.tokens_per_second) for entry in front]
    device = front[0].available_bytes / GIB
    fitting = [entry for entry in entries if entry[0] <= device]
    if fitting:
        size, label, speed = fitting[0]
        text = (
            f"{len(fitting)} of {len(entries)} layouts fit; the fastest of them is {label}, with {speed:,.0f} tokens/s"
            f" in {size:.1f} GiB."
        )
    else:
        text = f"nothing fits; the smallest layout needs {min(size for size, *_ in entries):.1f} GiB."
    return MemorySlider(device, entries, f"{device:.1f} GiB a device: {text}")


def front_table(front: Sequence[Prediction]) -> Table:
    """Return the layouts of the front, the fastest first."""
    rows = [
        (
            entry.label(),
            f"{gib(entry):.1f}",
            entry.verdict.fits,
            f"{entry.step_seconds:.4g}",
            f"{entry.tokens_per_second:,.0f}",
            *([shlex.join(run_overrides(entry.config))] if entry.is_runnable else []),
        )
        for entry in front
    ]
    header = ["layout", "GiB of a device", "fits", "step s", "tokens/s"]
    header += ["overrides of its run"] if front[0].is_runnable else []
    return Table(header, rows, 1, "The front, the fastest first")


def best_table(best: Sequence[Prediction]) -> Table:
    """Return the fastest layouts that fit, with what their steps and their memory consist of."""
    seconds = [seconds_of_parts(entry) for entry in best]
    shown = [part for part in seconds[0] if any(parts[part] for parts in seconds)]
    header = ["layout", "step s", *(f"{part} s" for part in shown), "tokens/s", "tokens/s of a device", "MFU %"]
    header += ["peak GiB", "reserved GiB", "fits", "fullest rank", "phase of its peak"]
    rows = [
        (
            entry.label(),
            f"{entry.step_seconds:.4g}",
            *(f"{parts[part]:.4g}" for part in shown),
            f"{entry.tokens_per_second:,.0f}",
            f"{entry.tokens_per_second / entry.layout.world_size:,.0f}",
            "" if entry.mfu is None else f"{100 * entry.mfu:.1f}",
            f"{entry.memory.peak_bytes / GIB:.1f}",
            f"{entry.peak.memory.reserved_bytes / GIB:.1f}" if entry.cluster.device == "cuda" else "",
            entry.verdict.fits,
            str(entry.peak.rank),
            entry.peak.phase,
        )
        for entry, parts in zip(best, seconds, strict=True)
    ]
    return Table(header, rows, 1, "Their steps and their memory; the parts add up to the step")


def seconds_of_parts(entry: Prediction) -> dict[str, float]:
    """Return the seconds of a step by the parts that the table of the best layouts has, in its order."""
    time = entry.time
    exposed = {f"exposed {axis}": time.exposed_communication_seconds.get(axis, 0.0) for axis in reversed(AXES)}
    parts = {"compute": time.compute_seconds} | exposed | {"copies": entry.copy_seconds}
    return parts | {"bubble": time.bubble_seconds, "optimizer": time.optimizer_seconds, "rest": time.other_seconds}
