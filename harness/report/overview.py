"""The whole comparison: its table, its pivots, and the chart whose axes the reader of the page chooses."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from harness.records.schema import COLUMNS
from harness.report.charts import speed, tradeoffs
from harness.report.charts.rows import scaled
from harness.report.columns import ShownColumn, comparison_columns, from_lines, speed_texts, table_of, units_of, write
from harness.report.comparability import group_by, shared_settings, varying_columns
from harness.report.document import Best, Paragraph, Section, Table, section
from harness.report.labels import column_title, value_text
from harness.report.lines import STATE_COLUMNS, Line, baseline_name, column_values, distinct_values, least, rows_of
from harness.report.ranking import Group
from harness.report.text import ONE, sentence
from harness.report.view import View
from harness.util.text import sanitize

# The columns that the legend explains, where they have a value.
_EXPLAINED = ("speed_low", "unsettled", "is_ignored", "stale_reason")


def comparison(view: View) -> list[Section]:
    """Return the comparison with one row per line; the best of a column is marked if it is certain.

    Speeds are shown on demand only where the report is not on speeds.
    """
    lines, winners = view.lines, best(view)
    columns = comparison_columns(lines, short=False)
    columns = [
        replace(
            column,
            cells=[
                Best(cell) if line in winners.get(column.key, ()) else cell
                for line, cell in zip(lines, column.cells, strict=True)
            ],
            is_extra=column.is_extra or ("tokens/s" in column.title and not view.draws_speeds),
        )
        for column in columns
    ]
    main = replace(
        table_of(columns, caption=shared_settings(rows_of(lines))),
        strategies=[line.strategy for line in lines],
        extra=[position for position, column in enumerate(columns) if column.is_extra],
        keys=[column.key for column in columns],
    )
    return section(
        "Comparison",
        main,
        Paragraph(
            sentence(
                "comparison_legend",
                baseline=baseline_name(lines),
                known=[name for name in _EXPLAINED if {*distinct_values(lines, name)} - {False}],
                are_few=any("(n = " in text for text in speed_texts(lines)),
                has_best=bool(winners),
                has_repeats=any(count and count > 1 for count in column_values(lines, "runs")),
            )
        ),
        speed.throughput(view),
        tradeoffs.trade(view),
    )


def pivots(view: View, column: str | None = None) -> list[Section]:
    """Return strategy × checkpointing, if both vary and identify every line, and strategy by the requested column."""
    lines, parts = view.lines, _pivot(view, column) if column is not None else []
    kinds = {(line.get("strategy"), line.get("checkpointing")) for line in lines}
    vary = all(len(distinct_values(lines, name)) > 1 for name in ("strategy", "checkpointing"))
    if column != "checkpointing" and vary and len(kinds) == len(lines):
        parts += section("Strategy × checkpointing", *_grids(view, column_values(lines, "strategy"), "checkpointing"))
    return parts


def _pivot(view: View, column: str) -> list[Section]:
    """Return a row for each combination of the other columns that vary, and a column for each value of this one."""
    lines = view.lines
    names = [
        name for name in (*varying_columns(rows_of(lines)), "checkpointing") if len(distinct_values(lines, name)) > 1
    ]
    others = [name for name in ("strategy", *names) if name != column]
    rows = [[value_text(name, value) for name in others if (value := line.get(name)) is not None] for line in lines]
    grids = _grids(view, [" ".join(texts) or "all" for texts in rows], column)
    return section(f"Results by {column_title(column)}", *grids)


def _grids(view: View, names: Sequence[str], column: str) -> Iterator[Table]:
    """Yield a table for each figure. A line that is not ok shows its status; several lines of one cell are listed."""
    lines = view.lines
    values = column_values(lines, column)
    heads = list(dict.fromkeys(values))
    heads.sort(key=lambda value: (value is None, value if isinstance(value, (int, float)) else 0))
    rows = group_by(range(len(lines)), lambda row: names[row])
    peak, rate = (COLUMNS[name].title.capitalize() for name in ("peak_allocated_bytes", "tokens_per_second"))
    peaks = from_lines(lines, "peak_allocated_bytes", f"{peak} ({{unit}})")
    speeds = ShownColumn(rate, speed_texts(lines), ignored=column_values(lines, "is_ignored"))
    for figures in write([peaks, speeds][: 1 + view.draws_speeds]):
        texts = [cell if line.ok else line.status for line, cell in zip(lines, figures.cells, strict=True)]
        if any(figures.cells):
            cells = [
                [name, *(_join([texts[row] for row in own if values[row] == head]) for head in heads)]
                for name, own in rows.items()
            ]
            header = ["strategy", *("unknown" if head is None else str(head) for head in heads)]
            yield Table(header, cells, caption=figures.header, strategies=[name.split(" ")[0] for name in rows])


def _join(cells: Sequence[str]) -> str:
    """Return the lines of one cell; a single one keeps its mark."""
    return cells[0] if len(cells) == 1 else " / ".join(cells)


# The columns whose best value is marked: those of speed, which the ranking decides, and those that are counted exactly.
_TIMED = ("tokens_per_second", "tokens_per_second_per_device", "mfu", "step_seconds")

_COUNTED = ("peak_allocated_bytes", "activation_bytes", "communication_bytes", "state_bytes")


def best(view: View) -> dict[str, set[Line]]:
    """Return by column the lines that are best among comparable lines on as many ranks.

    Of speed and time it is the line that is certainly the fastest. Bytes are exact; a value that lines of different
    programs share is not marked.
    """
    names, shown = (*_TIMED, *_COUNTED), set(view.lines)
    winners = {name: {*chain(*(_best(group, name, shown) for group in view.groups))} for name in names}
    return {name: lines for name, lines in winners.items() if lines}


def _best(group: Group, name: str, shown: Collection[Line]) -> list[Line]:
    """Return the shown members with the best value, if they run one program and others do not."""
    known = [line for line in group.members if line in shown and line.get(name) is not None]
    if name in _TIMED:
        return [line for line in group.fastest if line in known]
    smallest = least(known, name)
    programs = [len({line.program for line in lines}) for lines in (smallest, known)]
    return smallest if programs[0] == 1 < programs[1] else []


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
    columns = [
        ShownColumn(f"{_title(name)}, {{unit}}", column_values(lines, name), kind, key=name)
        for name, kind in kinds.items()
    ]
    units = units_of(columns)
    known = {column.key for column in columns if sum(value is not None for value in column.cells) > 1}
    shown = [
        replace(column, header=column.header.removesuffix(", ")) for column in write(columns) if column.key in known
    ]
    numbers = {column.key: column.header for column in shown}
    axes = {
        column.key: [scaled(value, units.get(column.kind, ONE)) for value in column.cells]
        for column in columns
        if column.key in known
    }
    if len(numbers) < 2:
        return None
    texts = {name: _title(name) for name in _TEXTS if name == "strategy" or len(distinct_values(lines, name)) > 1}
    cells = {name: [sanitize(value or "") for value in column_values(lines, name)] for name in texts}
    labels = column_values(lines, "label")
    named = {"label": labels, **cells, **axes, "simulated": [float(line.is_simulated) for line in lines]}
    rows = [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
    others = [ShownColumn(texts[name], cells[name], number=False) for name in texts if name != "strategy"]
    value_table = table_of(
        [ShownColumn("run", labels, number=False), *others, *shown], caption="All values that can be drawn"
    )
    return ExplorerData(rows, texts, numbers, replace(value_table, strategies=[line.strategy for line in lines]))


def _title(name: str) -> str:
    return "model state" if name == "state_bytes" else COLUMNS[name].title
