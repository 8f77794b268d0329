"""The data of the chart whose axes the reader of the page chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.records.columns import column
from harness.report.columns import ShownColumn, table_of, units_of, write
from harness.report.document import Table
from harness.report.lines import STATE_COLUMNS, column_values, distinct_values
from harness.report.text import ONE
from harness.report.view import View
from harness.util.text import sanitize

_TEXTS = ("strategy", "checkpointing", "status", "precision", "engine", "model", "measured_on")

# The columns that can be an axis, with their kinds; the first two are the initial vertical and horizontal ones.
_TIMES = {
    "tokens_per_second": "number",
    "peak_allocated_bytes": "bytes",
    "tokens_per_second_per_device": "number",
    "step_seconds": "ms",
    "mfu": "share",
    "pipeline_bubble": "number",
}
_SIZES = {
    "state_bytes": "bytes",  # a column that only frames have
    **dict.fromkeys((*STATE_COLUMNS, "activation_bytes"), "bytes"),
    "communication_bytes": "sent",
    "loss_deviation": "deviation",
    "grad_deviation": "deviation",
}
_UNTIMED = {"communication_bytes": "sent", "peak_allocated_bytes": "bytes"}  # in place of times where charts have none

# The columns that can be an axis where they differ between rows.
_COUNTS = (
    *("parameters", "world_size", "micro_batch", "global_batch", "seq_len"),
    *("tp", "cp", "pp", "dp_shard", "dp_replicate"),
)


@dataclass(frozen=True)
class ExplorerData:
    """The texts and numbers of every row, by their names, and their titles."""

    rows: Sequence[Mapping[str, str | float | None]]  # each has `label` and `strategy` too; an unknown number is None
    texts: Mapping[str, str]  # to color by: name and title
    numbers: Mapping[str, str]  # to draw: name, and title with the unit of the rows' values
    table: Table  # the same values, for readers who do not see the chart


def build_explorer(view: View) -> ExplorerData | None:
    """Return the lines with every number that at least two of them have; None if there are no two such numbers."""
    lines = view.lines
    counts = [name for name in _COUNTS if len(distinct_values(lines, name)) > 1]
    kinds = (_TIMES if view.draws_speeds else _UNTIMED) | _SIZES | dict.fromkeys(counts, "number")
    columns = [ShownColumn(f"{_title(name)}, {{unit}}", column_values(lines, name), kinds[name]) for name in kinds]
    units = units_of(columns)
    numbers, axes, shown = {}, {}, []
    for name, values, written in zip(kinds, columns, write(columns), strict=True):
        if sum(value is not None for value in values.cells) > 1:
            size = units.get(values.kind, ONE).size
            numbers[name] = written.header.removesuffix(", ")
            axes[name] = [None if value is None else value / size for value in values.cells]
            shown.append(replace(written, header=numbers[name]))
    if len(numbers) < 2:
        return None
    texts = {name: _title(name) for name in _TEXTS if name == "strategy" or len(distinct_values(lines, name)) > 1}
    cells = {name: [sanitize(value or "") for value in column_values(lines, name)] for name in texts}
    labels = column_values(lines, "label")
    named = {"label": labels, **cells, **axes}
    rows = [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
    others = [ShownColumn(texts[name], cells[name], number=False) for name in texts if name != "strategy"]
    value_table = table_of(
        [ShownColumn("run", labels, number=False), *others, *shown], caption="All values that can be drawn"
    )
    return ExplorerData(rows, texts, numbers, replace(value_table, strategies=[line.strategy for line in lines]))


def _title(name: str) -> str:
    return "model state" if name == "state_bytes" else column(name).title
