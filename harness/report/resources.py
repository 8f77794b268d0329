"""The report's sections on pipelines, the time of a step, and operations."""

from collections.abc import Sequence

import pandas as pd

from harness.records.columns import column
from harness.records.schema import Record
from harness.report.charts import times as time_charts
from harness.report.charts import traffic
from harness.report.comparison_columns import disturbed_cells
from harness.report.document import Disturbed, Paragraph, Section, Table, run_table, section
from harness.report.frame import baseline_name, column_values, labelled
from harness.report.labels import STEP_TITLES
from harness.report.text import (
    MILLISECONDS,
    ONE,
    byte_unit,
    bytes_text,
    flop_unit,
    format_fractions,
    format_numbers,
    format_percents,
    format_ratios,
)
from harness.report.view import View

_HOW_TO_READ = (
    "Working time is forward and backward. Idle time is the rest of a step without the optimizer: waiting for other"
    " stages, sending, and the global gradient norm. The bubble is idle time over working time. The bubble in theory"
    " assumes equal stages and free communication: with p ranks, m micro-batches and v stages per rank it is (p − 1)/m"
    " for GPipe and 1F1B and (p − 1)/(vm) for interleaved 1F1B; for zero bubble it is a third of (p − 1)/(vm), if"
    " forward and the two halves of backward take equally long. Ranks that share processor cores wait for those as"
    " well, which no formula counts.",
    "A micro-batch is in flight in a stage from its forward to the end of its backward, and counts once for each stage"
    " of a rank that it is in flight in. GPipe has all m micro-batches in flight, 1F1B at most p; the activation memory"
    " grows with them. Stages are numbered from 0.",
)


def pipeline_section(view: View) -> list[Section]:
    """Return the section on pipelines, with one row per rank of every run that has a pipeline."""
    table, records = view.median_runs.table, view.median_runs.records
    names = ("label", "pipeline_bubble_theory", "is_ignored")
    runs = zip(*(column_values(table, name) for name in names), records, strict=True)
    entries = [(*figures, rank) for *figures, record in runs for rank in record.pipeline]
    if not entries:
        return []
    labels, formulas, ignored, ranks = zip(*entries, strict=True)

    def timed(cells: Sequence[str]) -> list[str]:
        return [Disturbed(cell) if is_ignored else cell for cell, is_ignored in zip(cells, ignored, strict=True)]

    activation_bytes = [rank["activation_bytes"] for rank in ranks]
    memory = byte_unit(activation_bytes)
    columns = {
        "run": list(labels),
        "rank": [str(rank["rank"]) for rank in ranks],
        "stages": [", ".join(map(str, rank["stages"])) for rank in ranks],
        "layers": [", ".join(map(str, rank["layers"])) for rank in ranks],
        "working ms": timed(format_numbers([rank["working_seconds"] for rank in ranks], MILLISECONDS)),
        "idle ms": timed(format_numbers([rank["idle_seconds"] for rank in ranks], MILLISECONDS)),
        "bubble": timed(format_fractions([rank["bubble"] for rank in ranks])),
        column("pipeline_bubble_theory").title: format_fractions(formulas),
        column("max_in_flight_micro_batches").title: [str(rank["in_flight"]) for rank in ranks],
        f"activations {memory.name}": format_numbers(activation_bytes, memory),
    }
    rows = list(zip(*columns.values(), strict=True))
    return section("Pipelines", Table(list(columns), rows), *map(Paragraph, _HOW_TO_READ))


def time(view: View) -> list[Section]:
    """Return the section on step time, with a column for each part of the median step; the parts add up to it."""
    table = view.median_runs.table
    columns = {header: format_numbers(column_values(table, name), MILLISECONDS) for name, header in STEP_TITLES.items()}
    columns = {header: cells for header, cells in columns.items() if any(cell not in ("", "0.00") for cell in cells)}
    if not columns:
        return []
    columns[column("step_seconds").title] = format_numbers(column_values(table, "step_seconds"), MILLISECONDS)
    columns["95th percentile"] = format_numbers(column_values(table, "step_seconds_p95"), MILLISECONDS)
    columns["spread %"] = format_percents(column_values(table, "step_seconds_iqr_ratio"))
    overlapped = "overlapped_communication_seconds"
    columns[column(overlapped).title] = format_numbers(column_values(table, overlapped), MILLISECONDS)
    columns[f"{column('cpu_seconds').title} s"] = format_numbers(column_values(table, "cpu_seconds"), ONE)
    columns["energy per token J"] = format_numbers(column_values(table, "joules_per_token"), ONE)
    return section(
        "Breakdown of step time (ms)",
        time_charts.step(view),
        time_charts.exposed_communication(view),
        run_table(table, {header: disturbed_cells(table, cells) for header, cells in columns.items()}),
        Paragraph(
            "The parts are those of the slowest rank in the median step; from data to other they add up to the step"
            " time. Communication is exposed while a collective is in flight and no operator computes, and overlapped"
            f" while one does.{_measured_text(table)}{_simulated_text(table)}{_virtual_text(table)} Other is the time"
            " outside all phases."
        ),
    )


def _measured_text(table: pd.DataFrame) -> str:
    """Return how the parts of measured steps were divided, with a space before it; empty where none was measured."""
    names = ("launch", "step_seconds", "pp", "measured_on")
    rows = list(zip(*(column_values(table, name) for name in names), strict=True))
    measured = [row for row in rows if row[0] != "simulated" and row[1] is not None]
    if not measured:
        return ""
    text = (
        " The shares of communication come from two traced steps, the phases from the timed ones. The"
        " spread is the interquartile range of the step times over their median. CPU time is the processor time of all"
        " ranks in one step, in seconds."
    )
    if any((degree or 1) > 1 for _, _, degree, _ in measured):
        text += " What a pipeline sends, and its waiting for other stages, is idle time."
    if any(device not in (None, "cpu") for *_, device in measured):
        text += " Idle time of a GPU is an upper bound, because the profiler slows the host that launches kernels."
    return text


def _simulated_text(table: pd.DataFrame) -> str:
    """Return what the parts of simulated steps are, with a space before it; empty where no simulation has times."""
    launches, seconds = column_values(table, "launch"), column_values(table, "step_seconds")
    if not any(launch == "simulated" and own is not None for launch, own in zip(launches, seconds, strict=True)):
        return ""
    return (
        " The step of a simulation is one step by a model of the device: its slowest simulated rank waits for the host,"
        " and for other stages of a pipeline, in its idle time, and what it sends to other stages is exposed."
    )


def _virtual_text(table: pd.DataFrame) -> str:
    """Return what the parts of rows without a step time are, with a space before it; empty where there are none."""
    if "virtual" not in column_values(table, "launch"):
        return ""
    return " A virtual run has no step time: its parts are what one rank computed alone."


def operations(view: View) -> list[Section]:
    """Return the section on operations per step: the model's, those that ran, and their share of the device's peak."""
    table = view.median_runs.table
    model, executed = column_values(table, "model_flops"), column_values(table, "executed_flops")
    if not any(model):
        return []
    ratios = [b / a if a and b else None for a, b in zip(model, executed, strict=True)]
    rates = column_values(table, "model_flops_per_second_per_device")
    unit, rate = flop_unit([*model, *executed]), flop_unit(rates)
    columns = {
        f"model {unit.name} per step": format_numbers(model, unit),
        f"executed {unit.name} per step": format_numbers(executed, unit),
        "executed / model": format_ratios(ratios),
        f"model {rate.name}/s per device": disturbed_cells(table, format_numbers(rates, rate)),
        "MFU %": disturbed_cells(table, format_percents(column_values(table, "mfu"))),
        "HFU %": disturbed_cells(table, format_percents(column_values(table, "hfu"))),
    }
    return section(
        "Floating-point operations",
        run_table(table, columns),
        Paragraph(
            "The model's operations are the matrix products and attention (not halved for its causal mask) of the"
            " forward, and twice as many for the backward. The executed operations were counted operator by operator on"
            " all ranks; they include the forwards that checkpointing repeats and the scores that fused attention"
            " recomputes."
            + (
                " A simulation counts those of one rank of every stage for all ranks of the stage, and none where"
                " simulate.rank left out a stage."
                if "simulated" in column_values(table, "launch")
                else ""
            )
            + (
                " MFU (model FLOPs utilization) and HFU (hardware FLOPs utilization) are the model's and the executed"
                " operations over the device's dense peak in the compute dtype; they are empty where that peak is not"
                " known."
                if any(column_values(table, "mfu"))
                else ""
            )
        ),
    )


def traffic_section(view: View) -> list[Section]:
    """Return the sections on the bytes sent: in total, compared with the formula, and by message size."""
    return [*_communication(view), *_formula(view)]


def _communication(view: View) -> list[Section]:
    """Return bytes and calls with a column for each mesh axis and operation."""
    table = view.median_runs.table
    entries = [_by_kind(record) for record in view.median_runs.records]
    kinds = sorted({kind for entry in entries for kind in entry})
    unit = byte_unit(
        [*column_values(table, "communication_bytes"), *(v for entry in entries for v, _ in entry.values())]
    )
    columns: dict[str, list[str]] = {}
    for axis, operation in kinds:
        sent = [entry.get((axis, operation), (None, 0)) for entry in entries]
        numbers = format_numbers([size for size, _ in sent], unit)
        cells = [f"{text} ({calls:,})" if text else "" for text, (_, calls) in zip(numbers, sent, strict=True)]
        columns[f"{operation} on {axis}"] = cells
    columns["total"] = format_numbers(column_values(table, "communication_bytes"), unit)
    compared = baseline_name(table)
    columns["× total"] = (
        format_ratios(column_values(table, "communication_bytes_ratio")) if compared else [""] * len(table)
    )
    if not any(map(any, columns.values())):
        return []
    return section(
        f"Communication ({unit.name} per step)",
        run_table(table, columns),
        Paragraph(
            "The bytes that the rank that sends most must send in one step under ring algorithms, counted from the"
            " collectives that ran, by operation and mesh axis; the number of calls is in parentheses."
            + (f" × is the ratio to {compared}." if compared else "")
        ),
    )


def _by_kind(record: Record) -> dict[tuple[str, str], tuple[float, int]]:
    """Return bytes and calls by axis and operation; entries of the same kind add up."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for entry in record.communication:
        kind = (str(entry["axis"]), str(entry["operation"]))
        size, calls = sums.get(kind, (0, 0))
        sums[kind] = (size + entry["bytes"], calls + entry["count"])
    return sums


def _formula(view: View) -> list[Section]:
    """Return the measured bytes and those of the formula, with one row per run and axis."""
    entries = [
        (label, entry)
        for label, record in labelled(view.median_runs.table, view.median_runs.records)
        for entry in record.traffic
    ]
    if not entries:
        return []
    unit = byte_unit([entry[key] for _, entry in entries for key in ("bytes", "formula_bytes")])
    ratios = [entry["bytes"] / entry["formula_bytes"] if entry["formula_bytes"] else None for _, entry in entries]
    columns = {
        "run": [label for label, _ in entries],
        "mesh axis": [entry["axis"] for _, entry in entries],
        "not in the formula": [
            ", ".join(f"{name} {size:,.0f} B" for name, size in entry["outside"].items()) for _, entry in entries
        ],
        f"sent {unit.name}": format_numbers([entry["bytes"] for _, entry in entries], unit),
        f"formula {unit.name}": format_numbers([entry["formula_bytes"] for _, entry in entries], unit),
        "sent / formula": format_ratios(ratios),
    }
    return section(
        "Bytes sent compared with the formula",
        traffic.traffic(view),
        Table(list(columns), list(zip(*columns.values(), strict=True)), label_columns=3),
        Paragraph(
            "The formula is the volume that the papers give, for this layout, model and number of micro-batches. It"
            " does not include scalars such as gradient norms, losses and overflow flags, which are listed under the"
            " name of the function that sends them."
        ),
        inner=section("Message sizes", _sizes(view)),
    )


def _sizes(view: View) -> Table | None:
    """Return the number and sizes of calls, with one row per run, axis and operation."""
    rows = []
    for label, record in labelled(view.median_runs.table, view.median_runs.records):
        for entry in record.communication:
            sizes = {int(size): count for size, count in (entry.get("sizes") or {}).items()}
            if sizes:
                ends = [bytes_text(size) for size in (min(sizes), _median(sizes), max(sizes))]
                names = [str(entry[key]) for key in ("axis", "operation", "dtype")]
                rows.append([label, *names, f"{sum(sizes.values()):,}", *ends])
    header = ["run", "mesh axis", "operation", "dtype", "calls", "smallest", "median", "largest"]
    return Table(header, rows, label_columns=4) if rows else None


def _median(counts: dict[int, int]) -> int:
    """Return the median of sizes that are given with their counts; of an even number of calls the upper one."""
    rank = sum(counts.values()) // 2
    for size in sorted(counts):
        rank -= counts[size]
        if rank < 0:
            return size
    raise ValueError("no sizes")
