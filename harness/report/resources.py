"""The report's sections on resources: pipelines, memory, what fills its peak, the time of a step, and operations."""

from collections.abc import Sequence

from harness.records.columns import column
from harness.records.schema import Record
from harness.report.charts import memory as memory_charts
from harness.report.charts import times as time_charts
from harness.report.comparison_columns import disturbed_cells
from harness.report.document import BulletList, Paragraph, Section, Table, run_table, section
from harness.report.frame import MEMORY_COLUMNS, baseline_name, column_values
from harness.report.labels import PEAK_PARTS, STEP_PARTS
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
    "A micro-batch is in flight in a stage from its forward to the end of its backward. GPipe has all m micro-batches"
    " in flight, 1F1B at most p; the activation memory grows with them. Stages are numbered from 0.",
)


def pipeline_section(view: View) -> list[Section]:
    """Return the section on pipelines, with one row per rank of every run that has a pipeline."""
    table, records = view.median_runs.table, view.median_runs.records
    runs = zip(column_values(table, "label"), column_values(table, "pipeline_bubble_theory"), records, strict=True)
    entries = [(label, formula, rank) for label, formula, record in runs for rank in record.pipeline]
    if not entries:
        return []
    labels, formulas, ranks = zip(*entries, strict=True)
    activation_bytes = [rank["activation_bytes"] for rank in ranks]
    memory = byte_unit(activation_bytes)
    columns = {
        "run": list(labels),
        "rank": [str(rank["rank"]) for rank in ranks],
        "stages": [", ".join(map(str, rank["stages"])) for rank in ranks],
        "layers": [", ".join(map(str, rank["layers"])) for rank in ranks],
        "working ms": format_numbers([rank["working_seconds"] for rank in ranks], MILLISECONDS),
        "idle ms": format_numbers([rank["idle_seconds"] for rank in ranks], MILLISECONDS),
        "bubble": format_fractions([rank["bubble"] for rank in ranks]),
        column("pipeline_bubble_theory").title: format_fractions(formulas),
        column("max_in_flight_micro_batches").title: [str(rank["in_flight"]) for rank in ranks],
        f"activations {memory.name}": format_numbers(activation_bytes, memory),
    }
    rows = list(zip(*columns.values(), strict=True))
    return section("Pipelines", Table(list(columns), rows), *map(Paragraph, _HOW_TO_READ))


# The sentences on memory of the host, for the columns that are shown only where one of them has a value.
_HOST_NOTES = {
    "offloaded_bytes": (
        " Parameters, gradients and optimizer state are counted on the device and on the host; the state on the host is"
        " no part of the device's peak memory."
    ),
    "offloaded_activation_bytes": (
        " Activations on the host are the most that offload stored there at once: on a GPU in addition to the column"
        " activations, on a CPU in the same memory."
    ),
}

# Columns beside the parts of memory; the registry does not have the last three.
_OTHER_MEMORY = {
    "peak_reserved_bytes": column("peak_reserved_bytes").title,
    "fragmentation_bytes": "fragmentation",
    "non_torch_bytes": "not allocated by torch",
    "peak_rss_bytes": "host process",
}

_DETAILED = ("gathered", "communication", "temporary")

_LARGEST = 3  # blocks of a run that are listed


def memory(view: View) -> list[Section]:
    """Return the section on memory: the maximum over ranks of each kind, and over the baseline's."""
    runs, table = view.median_runs, view.median_runs.table
    on_host = {name: column(name).title for name in _HOST_NOTES if any(column_values(table, name))}
    names = (*MEMORY_COLUMNS, *on_host, *_OTHER_MEMORY)
    unit = byte_unit([value for name in names for value in column_values(table, name)])
    compared = baseline_name(table)
    columns: dict[str, list[str]] = {}
    for name in MEMORY_COLUMNS:
        header = column(name).title
        columns[header] = format_numbers(column_values(table, name), unit)
        if compared:
            columns[f"× {header}"] = format_ratios(column_values(table, f"{name}_ratio"))
    columns["smallest peak of any rank"] = format_numbers(_least_peaks(runs.records), unit)
    for name, header in (on_host | _OTHER_MEMORY).items():
        columns[header] = format_numbers(column_values(table, name), unit)
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if not columns:
        return []
    return section(
        f"Memory ({unit.name})",
        run_table(table, columns),
        Paragraph(
            "Each column is the maximum over ranks. Parameters and optimizer state are measured between steps,"
            " gradients and activations at their maximum during a step; these maxima may occur at different times, so"
            " that their sum can differ from the peak."
            + (
                " Host process is the largest resident memory of any rank's process, including the interpreter and"
                " libraries."
                if any(column_values(table, "peak_rss_bytes"))
                else ""
            )
            + "".join(_HOST_NOTES[name] for name in on_host)
            + (f" × is the ratio to {compared}." if compared else "")
        ),
    )


def _least_peaks(records: Sequence[Record]) -> list[float | None]:
    """Return the smallest peak of any rank, if every rank's is recorded."""
    peaks = [[rank.peak_allocated_bytes for rank in record.ranks] for record in records]
    known = [[peak for peak in ranks if peak is not None] for ranks in peaks]
    complete = [bool(ranks) and len(ranks) == len(all_ranks) for ranks, all_ranks in zip(known, peaks, strict=True)]
    return [min(ranks) if is_complete else None for ranks, is_complete in zip(known, complete, strict=True)]


def peak(view: View) -> list[Section]:
    """Return the section on what fills the peak of the rank with the largest one.

    It has a column for each part and lists the largest blocks that are neither model state nor activations.
    """
    runs, table = view.median_runs, view.median_runs.table
    names = {f"at_peak_{part}_bytes": header for part, header in PEAK_PARTS.items()}
    names = {name: header for name, header in names.items() if any(column_values(table, name))}
    if not names:
        return []
    unit = byte_unit([value for name in (*names, "peak_allocated_bytes") for value in column_values(table, name)])
    columns = {header: format_numbers(column_values(table, name), unit) for name, header in names.items()}
    columns[column("peak_allocated_bytes").title] = format_numbers(column_values(table, "peak_allocated_bytes"), unit)
    columns = {"phase": [phase or "" for phase in column_values(table, "peak_phase")], **columns}
    largest = [
        (label, _largest(record)) for label, record in zip(column_values(table, "label"), runs.records, strict=True)
    ]
    blocks = [
        Paragraph("The largest buffers and temporary tensors, by their purpose or the operator that allocated them:"),
        BulletList([(label, text) for label, text in largest if text]),
    ]
    return section(
        f"Breakdown of peak memory ({unit.name})",
        memory_charts.peak(view),
        run_table(table, columns, label_columns=2),
        Paragraph(
            "All memory of the rank with the highest peak at the time of that peak, by its use; the parts add up to the"
            " peak. The phase is the one in which the peak occurred. Gathered parameters are shards that were gathered"
            " for computing; communication buffers are buckets, gradients that wait for their reduction, and copies of"
            " the communication backend; temporary tensors are all others, which live within an operator or between"
            " two."
        ),
        *(blocks if any(text for _, text in largest) else ()),
    )


def _largest(record: Record) -> str:
    peak_rank = record.row.get("peak_rank")
    peaks = [rank.profiled.at_peak for rank in record.ranks if rank.rank == peak_rank]
    parts = [part for at_peak in peaks if at_peak for part in at_peak.parts if part.role in _DETAILED]
    largest = sorted(parts, key=lambda part: -part.bytes)[:_LARGEST]
    return ", ".join(f"{part.what} {bytes_text(part.bytes)}" for part in largest)


def time(view: View) -> list[Section]:
    """Return the section on step time, with a column for each part of the median step; the parts add up to it."""
    table = view.median_runs.table
    columns = {header: format_numbers(column_values(table, name), MILLISECONDS) for name, header in STEP_PARTS.items()}
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
        run_table(table, {header: disturbed_cells(table, cells) for header, cells in columns.items() if any(cells)}),
        Paragraph(
            "The parts are those of the slowest rank in the median step; from data to other they add up to the step"
            " time. Communication is exposed while a collective is in flight and no operator computes, and overlapped"
            " while one does. The shares of communication come from two steps under torch's profiler, the phases from"
            " the timed steps. Other is the time outside all phases. The spread is the interquartile range of the step"
            " times over their median. CPU time is the processor time of all ranks in one step, in seconds."
        ),
    )


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
        run_table(table, {header: cells for header, cells in columns.items() if any(cells)}),
        Paragraph(
            "The model's operations are the matrix products and attention (not halved for its causal mask) of the"
            " forward, and twice as many for the backward. The executed operations were counted operator by operator on"
            " all ranks; they include the forwards that checkpointing repeats and the scores that fused attention"
            " recomputes. MFU (model FLOPs utilization) and HFU (hardware FLOPs utilization) are the model's and the"
            " executed operations over the device's dense peak in the compute dtype; they are empty where that peak is"
            " not known."
        ),
    )
