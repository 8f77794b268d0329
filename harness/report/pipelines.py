"""The report's section on pipelines: what every rank of one holds, how its time divides, what it keeps for backward."""

from harness.report import comparison as c
from harness.report.document import Grid, Prose, Section, section
from harness.report.view import View

_HOW_TO_READ = (
    "Working is forward and backward. Idle is what is left of a step beside forward, backward and the optimizer:"
    " waiting for other stages, sending, the global gradient norm. The bubble is idle over working"
    " time. The formula holds for equal stages and free communication: with p ranks, m micro-batches and v stages a"
    " rank it is (p − 1)/m for GPipe and 1F1B and (p − 1)/(vm) for interleaved 1F1B; for zero bubble it is a third of"
    " (p − 1)/(vm), if forward and the two halves of backward take equally long. Ranks that share processor cores wait"
    " for those as well, which no formula counts.",
    "A pass is one micro-batch through one stage, in flight from its forward to the end of its backward. GPipe keeps"
    " all m micro-batches in flight, 1F1B at most p; activations follow. Stages are numbered from 0.",
)


def pipelines(view: View) -> list[Section]:
    """A row a rank of every run that has a pipeline."""
    one, table = view.middle_runs, view.middle_runs.table
    runs = zip(c.values(table, "label"), c.values(table, "bubble_formula"), one.records, strict=True)
    found = [(label, formula, rank) for label, formula, record in runs for rank in record.get("pipeline") or []]
    if not found:
        return []
    labels, formulas, ranks = zip(*found, strict=True)
    held_bytes = [rank["activation_bytes"] for rank in ranks]
    memory = c.byte_unit(held_bytes)
    columns = {
        "run": list(labels),
        "rank": [str(rank["rank"]) for rank in ranks],
        "stages": [", ".join(map(str, rank["stages"])) for rank in ranks],
        "layers": [", ".join(map(str, rank["layers"])) for rank in ranks],
        "working ms": c.scaled([rank["working_seconds"] for rank in ranks], c.MILLISECONDS),
        "idle ms": c.scaled([rank["idle_seconds"] for rank in ranks], c.MILLISECONDS),
        "bubble": c.fractions([rank["bubble"] for rank in ranks]),
        "formula": c.fractions(formulas),
        "passes in flight": [str(rank["in_flight"]) for rank in ranks],
        f"activations {memory.name}": c.scaled(held_bytes, memory),
    }
    rows = list(zip(*columns.values(), strict=True))
    return section("Pipelines", Grid(list(columns), rows), *map(Prose, _HOW_TO_READ))
