"""The data of the chart whose axes the reader of the page chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from harness.records.columns import column
from harness.report.document import Table
from harness.report.frame import STATE_COLUMNS, column_values, distinct_values
from harness.report.text import MILLISECONDS, ONE, Unit, byte_unit, format_deviations, format_numbers
from harness.report.view import View
from harness.util.text import sanitize

_TEXTS = ("strategy", "checkpointing", "status", "precision", "engine", "model", "measured_on")

_STATE = "state_bytes"  # a column that only frames have

_MEMORY = ("peak_allocated_bytes", _STATE, *STATE_COLUMNS, "activation_bytes")

_TIMES = ("tokens_per_second_per_device", "step_seconds", "mfu", "pipeline_bubble")

_SIZES = (_STATE, *STATE_COLUMNS, "activation_bytes", "communication_bytes", "loss_deviation", "grad_deviation")

# The columns that can be an axis; the first two are the initial vertical and horizontal ones.
_NUMBERS = ("tokens_per_second", "peak_allocated_bytes", *_TIMES, *_SIZES)

_UNTIMED_NUMBERS = ("communication_bytes", "peak_allocated_bytes", *_SIZES)  # where charts have no speeds

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
    table = view.line_medians
    numbers: dict[str, str] = {}
    columns: dict[str, list[float | None]] = {}
    shown: dict[str, list[str]] = {}
    for name, unit in _units(table, view.draws_speeds).items() if len(table) else ():
        values = column_values(table, name)
        if sum(value is not None for value in values) > 1:
            title = "model state" if name == _STATE else column(name).title
            numbers[name] = f"{title}, {unit.name}" if unit.name else title
            columns[name] = [None if value is None else value / unit.size for value in values]
            shown[name] = format_deviations(values) if name.endswith("_deviation") else format_numbers(values, unit)
    if len(numbers) < 2:
        return None
    texts = {name: column(name).title for name in _TEXTS if name == "strategy" or len(distinct_values(table, name)) > 1}
    text_cells = {name: [sanitize(value or "") for value in column_values(table, name)] for name in texts}
    labels = column_values(table, "label")
    rows = [{"label": sanitize(label), **_at(row, text_cells), **_at(row, columns)} for row, label in enumerate(labels)]
    others = [name for name in texts if name != "strategy"]  # the label names the strategy
    cells = [
        [label, *(text_cells[name][row] for name in others), *(shown[name][row] for name in numbers)]
        for row, label in enumerate(labels)
    ]
    header = ["run", *(texts[name] for name in others), *numbers.values()]
    strategies = [value or "" for value in column_values(table, "strategy")]
    value_table = Table(header, cells, 1 + len(others), "All values that can be drawn", strategies)
    return ExplorerData(rows, texts, numbers, value_table)


def _at(row: int, columns: Mapping[str, Sequence[str | float | None]]) -> dict[str, str | float | None]:
    """Return the values of one row, by the names of their columns."""
    return {name: values[row] for name, values in columns.items()}


def _units(table: pd.DataFrame, has_times: bool) -> dict[str, Unit]:
    """Return every number that can be an axis, with the unit of its values."""
    memory = byte_unit([value for name in _MEMORY for value in column_values(table, name)])
    units = {
        **dict.fromkeys(_MEMORY, memory),
        "communication_bytes": byte_unit(column_values(table, "communication_bytes")),
        "step_seconds": MILLISECONDS,
        "mfu": Unit("%", 0.01),
    }
    numbers = {name: units.get(name, ONE) for name in (_NUMBERS if has_times else _UNTIMED_NUMBERS)}
    return numbers | {name: ONE for name in _COUNTS if len(distinct_values(table, name)) > 1}
