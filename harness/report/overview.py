"""The report's first sections: an introduction, the comparison and its pivots."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from harness.records.columns import column as registered
from harness.records.schema import Record
from harness.report.best import best
from harness.report.charts import speed, tradeoffs
from harness.report.comparison_columns import comparison_columns
from harness.report.document import Best, Paragraph, Section, Table, section
from harness.report.frame import baseline_names, column_values, distinct_values, shared_settings, varying_columns
from harness.report.labels import VARYING, column_title, value_text
from harness.report.spread import HOW_TO_READ
from harness.report.text import ONE, byte_unit, format_numbers, pluralize
from harness.report.view import View

_PIVOT_FIGURES = ("peak_allocated_bytes", "tokens_per_second")  # of lines that are ok


def introduction(view: View) -> Paragraph:
    """Return how many runs there are, how they ended, what they share, and the versions they were recorded with."""
    table, records = view.line_medians, view.records
    statuses = Counter(record.status for record in records)
    text = f"{pluralize(len(records), 'run')} ({', '.join(f'{count} {status}' for status, count in statuses.items())})"
    text += f" of {pluralize(len(view.lines), 'configuration')}" if len(view.lines) < len(records) else ""
    shared = "; ".join(shared_settings(table))
    text += f". All have in common: {shared}." if shared else "."
    varied = ", ".join(column_title(name) for name in varying_columns(table))
    text += f" They differ in the strategy and in: {varied}." if varied else ""
    recorded_with = [f"{key} {', '.join(values)}" for key, values in recorded_versions(records).items()]
    text += f" Recorded with {', '.join(recorded_with)}." if recorded_with else ""
    if view.running:
        text += f" Still running and not in the tables: {', '.join(view.running)}."
    return Paragraph(text)


def recorded_versions(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return every version of each package that the rows were recorded with."""
    versions_of: dict[str, dict[str, None]] = {}
    for record in records:
        for key, version in record.versions.items():
            if version is not None:
                versions_of.setdefault(key, {})[str(version)] = None
    return {key: list(versions) for key, versions in versions_of.items()}


def comparison(view: View) -> list[Section]:
    """Return the comparison with one row per line; the best of a column is marked if it is certain."""
    table = view.line_medians
    columns = comparison_columns(table, short=False)
    winners = best(view)
    cells = [
        [Best(cell) if position in winners.get(column.key, ()) else cell for position, cell in enumerate(column.cells)]
        for column in columns
    ]
    baseline = baseline_names(table)
    caption = "; ".join(shared_settings(table))
    names = sum(not column.number for column in columns)
    strategies = [str(strategy or "") for strategy in column_values(table, "strategy")]
    rows = list(zip(*cells, strict=True))
    return section(
        "Comparison",
        Table([column.title for column in columns], rows, names, caption, strategies),
        Paragraph(" ".join(_legend(table, baseline, bool(winners)))),
        speed.throughput(view),
        tradeoffs.trade(view),
    )


def _legend(table: pd.DataFrame, baseline: str, has_best: bool) -> Iterator[str]:
    """Yield a sentence for each term and mark that the comparison uses."""
    if baseline:
        yield f"× is the ratio to {baseline}."
    yield (
        "Memory is the maximum over ranks. Model state is the parameters, gradients and optimizer state, on the device"
        " and on the host. Communication is the bytes that one rank sends per step. The deviations are the largest"
        " relative differences from the single-process reference."
    )
    if has_best:
        yield (
            "Bold marks the best value of a column among comparable runs on the same number of ranks, where it leads by"
            " more than the spread."
        )
    if distinct_values(table, "mfu"):
        yield "MFU is model FLOPs utilization: the model's operations over the peak of all devices."
    if distinct_values(table, "pipeline_bubble"):
        yield "The bubble is the idle time of all pipeline stages over their working time."
    if baseline or distinct_values(table, "between_runs"):
        yield HOW_TO_READ
    if any(count > 1 for count in column_values(table, "runs")):
        yield (
            "For repeated runs the tables below show the run with the median speed; the sections on proof, failures and"
            " noise warnings show every run."
        )
    if any(column_values(table, "noise_warning")):
        yield "‡ marks runs with a noise warning; the warnings are listed below."
    if distinct_values(table, "stale_reason"):
        yield "† marks stale rows, which were recorded with other versions than are installed; they are listed below."


def pivots(view: View, column: str | None = None) -> list[Section]:
    """Return strategy × checkpointing, if both vary and identify every line, and strategy by the requested column."""
    table = view.line_medians
    pivots: list[Section] = []
    if column is not None:
        pivots += _pivot(table, column)
    if (
        column != "checkpointing"
        and len(distinct_values(table, "strategy")) > 1
        and len(distinct_values(table, "checkpointing")) > 1
    ):
        names = column_values(table, "strategy")
        pairs = list(zip(names, column_values(table, "checkpointing"), strict=True))
        if len(set(pairs)) == len(pairs):
            pivots += section("Strategy × checkpointing", *_grids(table, names, column_values(table, "checkpointing")))
    return pivots


def _pivot(table: pd.DataFrame, column: str) -> list[Section]:
    """Return a row for each combination of the other columns that vary, and a column for each value of this one."""
    other = [name for name in (*varying_columns(table), "checkpointing") if name != column]
    other = [name for name in other if len(distinct_values(table, name)) > 1]
    names = []
    for line in table.to_dict("records"):
        parts = [str(line["strategy"])] if column != "strategy" else []
        parts += [_phrase(name, line[name]) for name in other if line[name] is not None and not pd.isna(line[name])]
        names.append(" ".join(parts) or "all")
    return section(f"Results by {column_title(column)}", *_grids(table, names, column_values(table, column)))


def _phrase(name: str, value: Any) -> str:
    return value_text(name, value) if name in VARYING else str(value)


def _grids(table: pd.DataFrame, names: Sequence[str], values: Sequence[Any]) -> Iterator[Table]:
    """Yield a table for each figure. A line that is not ok shows its status; several lines of one cell are listed."""
    heads = list(dict.fromkeys(values))
    heads.sort(key=lambda value: (value is None, value if isinstance(value, (int, float)) else 0))
    cell_keys = list(zip(names, values, column_values(table, "status"), strict=True))
    for key in _PIVOT_FIGURES:
        title = registered(key).title.capitalize()
        numbers = column_values(table, key)
        unit = byte_unit(numbers) if key.endswith("_bytes") else ONE
        cells: dict[tuple[str, Any], list[str]] = {}
        for (name, value, status), number in zip(cell_keys, format_numbers(numbers, unit), strict=True):
            cells.setdefault((name, value), []).append(number if status == "ok" else status)
        if any(number is not None for number in numbers):
            rows = [
                [name, *(" / ".join(cells.get((name, head), ())) for head in heads)] for name in dict.fromkeys(names)
            ]
            header = ["strategy", *("unknown" if head is None else str(head) for head in heads)]
            caption = f"{title} ({unit.name})" if unit.name else title
            yield Table(header, rows, caption=caption, strategies=[name.split(" ")[0] for name in dict.fromkeys(names)])
