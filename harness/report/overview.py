"""The report's sections on the whole comparison: its table and its pivots."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.records.columns import column as registered
from harness.report.charts import speed, tradeoffs
from harness.report.columns import ShownColumn, from_frame, table_of, write
from harness.report.comparability import EQUAL_BYTES
from harness.report.comparison_columns import comparison_columns, speed_texts
from harness.report.document import Best, Paragraph, Section, Table, section
from harness.report.frame import baseline_name, column_values, distinct_values, shared_settings, varying_columns
from harness.report.labels import VARYING, column_title, value_text
from harness.report.sentences import sentence
from harness.report.view import View

# The columns that the legend explains, where they have a value.
_EXPLAINED = (
    *("speed_low", "is_crowded", "unsettled", "loss_deviation", "mfu", "pipeline_bubble", "is_ignored", "stale_reason"),
)


def comparison(view: View) -> list[Section]:
    """Return the comparison with one row per line; the best of a column is marked if it is certain."""
    table = view.line_medians
    columns = comparison_columns(table, short=False)
    winners = best(view)
    columns = [
        replace(
            column,
            cells=[Best(cell) if row in winners.get(column.key, ()) else cell for row, cell in enumerate(column.cells)],
        )
        for column in columns
    ]
    main = replace(
        table_of(columns, caption="; ".join(shared_settings(table))),
        strategies=[str(strategy or "") for strategy in column_values(table, "strategy")],
        extra=[position for position, column in enumerate(columns) if column.is_extra],
        keys=[column.key for column in columns],
    )
    return section(
        "Comparison",
        main,
        Paragraph(
            sentence(
                "comparison_legend",
                baseline=baseline_name(table),
                known=[name for name in _EXPLAINED if {*distinct_values(table, name)} - {False}],
                are_few=any("(n = " in text for text in speed_texts(table)),
                is_simulated="simulated" in column_values(table, "launch"),
                has_best=bool(winners),
                has_repeats=any(count and count > 1 for count in column_values(table, "runs")),
            )
        ),
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
    return section(f"Results by {column_title(column)}", *_grids(table, names, column_values(table, column)))


def _phrase(name: str, value: Any) -> str:
    return value_text(name, value) if name in VARYING else str(value)


def _grids(table: pd.DataFrame, names: Sequence[str], values: Sequence[Any]) -> Iterator[Table]:
    """Yield a table for each figure. A line that is not ok shows its status; several lines of one cell are listed."""
    heads = list(dict.fromkeys(values))
    heads.sort(key=lambda value: (value is None, value if isinstance(value, (int, float)) else 0))
    cell_keys = list(zip(names, values, column_values(table, "status"), strict=True))
    title = registered("peak_allocated_bytes").title.capitalize()
    peaks = from_frame(table, "peak_allocated_bytes", f"{title} ({{unit}})")
    speeds = ShownColumn(registered("tokens_per_second").title.capitalize(), speed_texts(table), is_timed=True)
    for figures in (peaks, speeds):
        (written,) = write([figures], column_values(table, "is_ignored"))
        cells: dict[tuple[str, Any], list[str]] = {}
        for (name, value, status), number in zip(cell_keys, written.cells, strict=True):
            cells.setdefault((name, value), []).append(number if status == "ok" else status)
        if figures.is_known:
            rows = [[name, *(_join(cells.get((name, head), ())) for head in heads)] for name in dict.fromkeys(names)]
            header = ["strategy", *("unknown" if head is None else str(head) for head in heads)]
            strategies = [name.split(" ")[0] for name in dict.fromkeys(names)]
            yield Table(header, rows, caption=written.header, strategies=strategies)


def _join(cells: Sequence[str]) -> str:
    """Return the lines of one cell; a single one keeps its mark."""
    return cells[0] if len(cells) == 1 else " / ".join(cells)


# The columns whose best value is marked: those of speed, which the ranking decides, and those that are counted exactly.
_TIMED = ("tokens_per_second", "tokens_per_second_per_device", "mfu", "step_seconds")

_COUNTED = ("peak_allocated_bytes", "activation_bytes", "communication_bytes", "state_bytes")


def best(view: View) -> dict[str, set[int]]:
    """Return by column the positions of the lines that are best among comparable lines on as many ranks.

    Of speed and time it is the line that is certainly the fastest. Bytes are exact; a value that lines of different
    programs share is not marked.
    """
    winners: dict[str, set[int]] = {name: set() for name in (*_TIMED, *_COUNTED)}
    columns = {name: column_values(view.line_medians, name) for name in winners}
    for group in view.ranking.groups:
        for name in _TIMED:
            winners[name] |= {position for position in group.fastest if columns[name][position] is not None}
        for name in _COUNTED:
            winners[name] |= _least(columns[name], group.members, view)
    return {name: positions for name, positions in winners.items() if positions}


def _least(values: Sequence[Any], members: Sequence[int], view: View) -> set[int]:
    """Return the members with the smallest value, if they run one program and others do not."""
    known = [position for position in members if values[position] is not None]
    programs = [view.ranking.standings[position].program for position in known]
    least = min((values[position] for position in known), default=0)
    smallest = {position for position in known if values[position] <= (1 + EQUAL_BYTES) * least}
    names = {view.ranking.standings[position].program for position in smallest}
    return smallest if len(names) == 1 and len(set(programs)) > 1 else set()
