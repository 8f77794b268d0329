"""The report's table of contents. Measured and predicted values never share a column."""

from dataclasses import replace

from harness.config.locations import files_in, first_sentence
from harness.report.caveats import (
    caveats,
    disturbed,
    failures,
    literature,
    predicted_section,
    proof_section,
    stale,
    unreadable,
    versions,
)
from harness.report.charts import memory as memory_charts
from harness.report.charts import speed, tradeoffs
from harness.report.document import Banner, BulletList, Paragraph, Section, section
from harness.report.findings import findings
from harness.report.first_screen import banner, compared_text, first_answers, fits_table, warning
from harness.report.memory_sections import batches, memory, peak
from harness.report.overview import comparison, pivots
from harness.report.repeating import repeating
from harness.report.resources import communication, formula, operations, pipeline_section, time
from harness.report.sources import sources
from harness.report.text import sentence
from harness.report.view import MOST, View, truncate


def sections(view: View, pivot: str | None = None, fits_in: int | None = None) -> list[Section]:
    """Return the whole report: the answers, what they do not say, the tables, and folded details.

    Args:
        view: The runs to report.
        pivot: A column of runs.csv to tabulate strategies against.
        fits_in: The memory in bytes that a recommendation has to fit in.
    """
    part = truncate(view, MOST)
    truncation = sentence("truncation", shown=len(part.records), total=len(view.records))
    details = [
        *operations(part),
        *communication(part),
        *formula(part),
        *pipeline_section(part),
        *literature(part),
        *predicted_section(part),
        *proof_section(part),
        *disturbed(part),
        *words(view),
        *stale(part),
        *repeating(part),
        *versions(view),
        *unreadable(view),
    ]
    return [
        *_first(view, part, fits_in),
        *caveats(view),
        *section("", Paragraph(truncation) if len(part.records) < len(view.records) else None),
        *comparison(part),
        *failures(part),
        *pivots(part, pivot),
        *findings(view),
        *sources(view),
        *memory(part),
        *peak(part),
        *section("Peak memory by model size", memory_charts.largest_model(view), memory_charts.memory_wall(part)),
        *section("Memory savings and cost of activation checkpointing", tradeoffs.checkpointing(part)),
        *batches(part),
        *time(part),
        *section("Scaling with the number of ranks", speed.scaling(part)),
        *(replace(entry, is_folded=True) for entry in details),
    ]


def _first(view: View, part: View, fits_in: int | None) -> list[Section]:
    """Return the first screen: what was compared, the answers, one picture, and what fits in a device's memory."""
    if not view.lines:
        return section("", Paragraph(sentence("no_runs")))
    frames = [Banner(text) if text else None for text in (warning(view), banner(view))]
    answers = [*first_answers(view, fits_in)]
    return section(
        "Summary",
        frames[0],
        Paragraph(compared_text(view)),
        frames[1],
        BulletList(answers) if answers else None,
        tradeoffs.first_picture(part),
        fits_table(view),
        is_first=True,
    )


_TERMS = (
    *("rank", "micro-batch", "activations", "checkpointing", "model state", "peak memory", "exposed communication"),
    "bf16_mixed",
)


def words(view: View) -> list[Section]:
    """Return the section with what the file of each strategy of the report says of it, and with each term."""
    files = files_in("strategy")  # those of other folders than are at hand have no line
    names = dict.fromkeys(str(line.row.get("strategy")) for line in view.lines)
    about = {name: first_sentence(files[name].read_text(encoding="utf-8")) for name in names if name in files}
    known = [(name, text) for name, text in about.items() if text]
    return (
        section("Words", BulletList([*known, *((term, sentence("term", name=term)) for term in _TERMS)]))
        if view.lines
        else []
    )
