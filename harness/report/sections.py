"""The report's table of contents. Measured and predicted never share a column."""

from harness.report.batches import batches
from harness.report.charts import growth, speed, tradeoffs
from harness.report.claims import literature
from harness.report.costs import memory, operations, peak, time
from harness.report.document import Prose, Section, section
from harness.report.ends import disturbed, failures, stale, unreadable, versions
from harness.report.evidence import predicted, proof
from harness.report.findings import findings
from harness.report.limits import limits
from harness.report.overview import comparison, introduction, pivots
from harness.report.pipelines import pipelines
from harness.report.traffic import traffic
from harness.report.view import MOST, View, shown


def sections(view: View, pivot: str | None = None, fits_in: int | None = None) -> list[Section]:
    """The whole report.

    pivot: a column of runs.csv to set strategies against. fits_in: bytes that a recommendation has to fit in.
    """
    part = shown(view, MOST)
    return [
        *section("", introduction(view)),
        *findings(view, fits_in),
        *section("", _cut(view, part)),
        *comparison(part),
        *failures(part),
        *limits(view),
        *pivots(part, pivot),
        *memory(part),
        *peak(part),
        *section("How memory grows with the model", growth.wall(part)),
        *section("What checkpointing saves and costs", tradeoffs.checkpointing(part)),
        *batches(part),
        *time(part),
        *section("How speed grows with the world", speed.scaling(part)),
        *operations(part),
        *traffic(part),
        *pipelines(part),
        *literature(part),
        *predicted(part),
        *proof(part),
        *disturbed(part),
        *stale(part),
        *versions(view),
        *unreadable(view),
    ]


def _cut(view: View, part: View) -> Prose | None:
    if len(part.records) == len(view.records):
        return None
    return Prose(
        f"The tables show {len(part.records)} of {len(view.records)} runs: of every strategy the fastest, then in the"
        " order of their start. All are in runs.csv and runs.parquet."
    )
