"""The report's table of contents. Measured and predicted values never share a column."""

from harness.report.appendix import disturbed, failures, predicted_section, proof_section, stale, unreadable, versions
from harness.report.batches import batches
from harness.report.caveats import caveats
from harness.report.charts import growth, speed, tradeoffs
from harness.report.claims import literature
from harness.report.document import Paragraph, Section, section
from harness.report.findings import findings
from harness.report.overview import comparison, introduction, pivots
from harness.report.resources import memory, operations, peak, pipeline_section, time
from harness.report.traffic import traffic_section
from harness.report.view import MOST, View, truncate


def sections(view: View, pivot: str | None = None, fits_in: int | None = None) -> list[Section]:
    """Return the whole report.

    Args:
        view: The runs to report.
        pivot: A column of runs.csv to tabulate strategies against.
        fits_in: The memory in bytes that a recommendation has to fit in.
    """
    part = truncate(view, MOST)
    return [
        *section("", introduction(view)),
        *findings(view, fits_in),
        *section("", _truncation(view, part)),
        *comparison(part),
        *failures(part),
        *caveats(view),
        *pivots(part, pivot),
        *memory(part),
        *peak(part),
        *section("Peak memory by model size", growth.memory_wall(part)),
        *section("Memory savings and cost of activation checkpointing", tradeoffs.checkpointing(part)),
        *batches(part),
        *time(part),
        *section("Scaling with the number of ranks", speed.scaling(part)),
        *operations(part),
        *traffic_section(part),
        *pipeline_section(part),
        *literature(part),
        *predicted_section(part),
        *proof_section(part),
        *disturbed(part),
        *stale(part),
        *versions(view),
        *unreadable(view),
    ]


def _truncation(view: View, part: View) -> Paragraph | None:
    if len(part.records) == len(view.records):
        return None
    return Paragraph(
        f"The tables show {len(part.records)} of {len(view.records)} runs: the fastest of every strategy, then the"
        " others in the order of their start. All runs are in runs.csv and runs.parquet."
    )
