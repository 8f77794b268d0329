"""The page's section on pipelines: what every rank of one holds, how its time divides, what it keeps for backward."""

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.records import Record
from harness.report import comparison as c
from harness.report.grid import escape, grid

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


def pipelines(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    """A row a rank of every run that has a pipeline."""
    runs = zip(c.values(table, "label"), c.values(table, "bubble_formula"), records, strict=True)
    found = [(label, formula, rank) for label, formula, record in runs for rank in record.get("pipeline") or []]
    if not found:
        return
    labels, formulas, ranks = zip(*found, strict=True)
    held_bytes = [rank["activation_bytes"] for rank in ranks]
    memory = c.byte_unit(held_bytes)
    columns = {
        "run": [escape(label) for label in labels],
        "rank": [escape(rank["rank"]) for rank in ranks],
        "stages": [escape(", ".join(map(str, rank["stages"]))) for rank in ranks],
        "layers": [escape(", ".join(map(str, rank["layers"]))) for rank in ranks],
        "working ms": c.scaled([rank["working_seconds"] for rank in ranks], c.MILLISECONDS),
        "idle ms": c.scaled([rank["idle_seconds"] for rank in ranks], c.MILLISECONDS),
        "bubble": c.fractions([rank["bubble"] for rank in ranks]),
        "formula": c.fractions(formulas),
        "passes in flight": [escape(rank["in_flight"]) for rank in ranks],
        f"activations {memory.name}": c.scaled(held_bytes, memory),
    }
    yield "## Pipelines"
    yield grid(list(columns), list(zip(*columns.values(), strict=True)))
    yield from _HOW_TO_READ
