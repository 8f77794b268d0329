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
from harness.report.costs import costs
from harness.report.decision import decision, title
from harness.report.document import Banner, BulletList, Decision, Paragraph, Section, section
from harness.report.findings import findings
from harness.report.first_screen import banner, compared_text, first_answers, fits_table
from harness.report.lines import distinct_values
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
    times = time(part)
    details = [
        *([] if view.draws_speeds else times),
        *costs(part),
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
        *(times if view.draws_speeds else []),
        *section("Scaling with the number of ranks", speed.scaling(part)),
        *(replace(entry, is_folded=True) for entry in details),
    ]


def _first(view: View, part: View, fits_in: int | None) -> list[Section]:
    """Return the first screen: the decision, its limits, the answers, one picture, what fits, and what was compared."""
    if not view.lines:
        return section("", Paragraph(sentence("no_runs")))
    limits, answers = banner(view), [*first_answers(view, fits_in)]
    return section(
        "Summary",
        Decision(*decision(view, fits_in)),
        Banner(limits) if limits else None,
        BulletList(answers) if answers else None,
        tradeoffs.first_picture(part),
        Paragraph(compared_text(view)),
        fits_table(view),
        heading=title(view),
        is_first=True,
    )


_TERMS = (
    *("rank", "micro-batch", "activations", "checkpointing", "model state", "peak memory", "communication"),
    *("exposed communication", "bf16_mixed", "repeats", "ranked", "certainly faster", "bold", "disturbed"),
    *("deviation", "MFU", "bubble"),
)

_OF_COLUMNS = {"deviation": "loss_deviation", "MFU": "mfu", "bubble": "pipeline_bubble"}  # terms that only these need


def words(view: View) -> list[Section]:
    """Return the section with what the file of each strategy of the report says of it, and with each term."""
    files = files_in("strategy")  # those of other folders than are at hand have no line
    names = dict.fromkeys(str(line.row.get("strategy")) for line in view.lines)
    about = {name: first_sentence(files[name].read_text(encoding="utf-8")) for name in names if name in files}
    known = [(name, text) for name, text in about.items() if text]
    terms = [term for term in _TERMS if term not in _OF_COLUMNS or distinct_values(view.lines, _OF_COLUMNS[term])]
    return (
        section("Words", BulletList([*known, *((term, sentence("term", name=term)) for term in terms)]))
        if view.lines
        else []
    )
