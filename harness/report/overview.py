"""The report's first sections: an introduction, the comparison and its pivots."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from harness.records.schema import Record
from harness.report.best import best
from harness.report.charts import speed, tradeoffs
from harness.report.comparison_columns import comparison_columns
from harness.report.document import Best, Paragraph, Section, Table, section
from harness.report.frame import baseline_names, column_values, distinct_values, shared_settings, varying_columns
from harness.report.labels import VARYING, value_text
from harness.report.spread import HOW_TO_READ
from harness.report.text import ONE, byte_unit, format_numbers, pluralize
from harness.report.view import View

# The figures that a pivot shows of lines that are ok, with their captions.
_PIVOT_FIGURES = {"peak_allocated_bytes": "Peak memory", "tokens_per_second": "Tokens per second"}


def introduction(view: View) -> Paragraph:
    """Return how many runs there are, how they ended, what they share, and the versions that made them."""
    table, records = view.line_medians, view.records
    statuses = Counter(record.status for record in records)
    text = f"{pluralize(len(records), 'run')} ({', '.join(f'{count} {status}' for status, count in statuses.items())})"
    text += f" of {pluralize(len(view.lines), 'line')}" if len(view.lines) < len(records) else ""
    shared = "; ".join(shared_settings(table))
    text += f", all of them: {shared}." if shared else "."
    varied = ", ".join(VARYING[name] for name in varying_columns(table))
    text += f" What varies beside the strategy: {varied}." if varied else ""
    made_by = [f"{key} {', '.join(values)}" for key, values in made_by_versions(records).items()]
    text += f" Made by {', '.join(made_by)}." if made_by else ""
    if view.running:
        text += f" Still running, and not in the tables: {', '.join(view.running)}."
    return Paragraph(text)


def made_by_versions(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return every version of each package that made a row."""
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
    words = (
        (f"× is the value over that of {baseline}. " if baseline else "")
        + "Memory is the maximum over ranks; state is parameters, gradients and optimizer, on the device and the host;"
        " comm. is what one rank sends in one step. The deviations are the largest relative differences from the"
        " single-process reference."
        + (
            " Bold marks the best of a column among as many ranks, where it leads by more than the spread."
            * bool(winners)
        )
        + (
            " The bubble is the idle time of all stages over their working time."
            if distinct_values(table, "pipeline_bubble")
            else ""
        )
        + (f" {HOW_TO_READ}" if baseline or distinct_values(table, "between_runs") else "")
        + (
            " Of a line with several runs the tables further down have the one whose speed is in the middle; of the"
            " proof, of failures and disturbances they have every run."
            if any(count > 1 for count in column_values(table, "runs"))
            else ""
        )
        + (" ‡ marks runs with a noise warning, listed below." if any(column_values(table, "noise_warning")) else "")
        + (" † marks rows made by other versions, listed below." if distinct_values(table, "stale_reason") else "")
    )
    names = sum(not column.number for column in columns)
    strategies = [str(strategy or "") for strategy in column_values(table, "strategy")]
    rows = list(zip(*cells, strict=True))
    return section(
        "Comparison",
        Table([column.title for column in columns], rows, names, caption, strategies),
        Paragraph(words),
        speed.throughput(view),
        tradeoffs.trade(view),
    )


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
    return section(f"By {VARYING.get(column, column)}", *_grids(table, names, column_values(table, column)))


def _phrase(name: str, value: Any) -> str:
    return value_text(name, value) if name in VARYING else str(value)


def _grids(table: pd.DataFrame, names: Sequence[str], values: Sequence[Any]) -> Iterator[Table]:
    """Yield a table for each figure. A line that is not ok shows its status; several lines of one cell are listed."""
    heads = list(dict.fromkeys(values))
    heads.sort(key=lambda value: (value is None, value if isinstance(value, (int, float)) else 0))
    places = list(zip(names, values, column_values(table, "status"), strict=True))
    for key, title in _PIVOT_FIGURES.items():
        numbers = column_values(table, key)
        unit = byte_unit(numbers) if key.endswith("_bytes") else ONE
        cells: dict[tuple[str, Any], list[str]] = {}
        for (name, value, status), number in zip(places, format_numbers(numbers, unit), strict=True):
            cells.setdefault((name, value), []).append(number if status == "ok" else status)
        if any(number is not None for number in numbers):
            rows = [
                [name, *(" / ".join(cells.get((name, head), ())) for head in heads)] for name in dict.fromkeys(names)
            ]
            header = ["strategy", *("unknown" if head is None else str(head) for head in heads)]
            caption = f"{title} ({unit.name})" if unit.name else title
            yield Table(header, rows, caption=caption, strategies=[name.split(" ")[0] for name in dict.fromkeys(names)])
