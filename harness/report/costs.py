"""The page's sections on what a run costs: memory, what fills its peak, the parts of a step, operations."""

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.records import Record
from harness.report import comparison as c
from harness.report.grid import escape, labelled

_MEMORY_HEADERS = dict(zip(c.MEMORY, ("parameters", "gradients", "optimizer", "activations", "peak"), strict=True))
_ON_HOST = {"offloaded_bytes": "state on the host", "offloaded_activation_bytes": "activations on the host"}
_BESIDE = {
    "peak_reserved_bytes": "peak reserved",
    "fragmentation_bytes": "fragmentation",
    "outside_bytes": "outside torch",
    "peak_host_bytes": "host process",
}
_HOST_NOTES = {
    "offloaded_bytes": (
        " Parameters, gradients and optimizer are counted wherever they lie: of them state on the host lies in the"
        " host's memory and is no part of the device's peak."
    ),
    "offloaded_activation_bytes": (
        " Activations on the host are the most that offload held there at once: on a GPU beside those of the column"
        " activations, on a CPU in the same memory."
    ),
}
_PARTS = {
    "parameter": "parameters",
    "optimizer": "optimizer",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "activation": "activations",
    "communication": "communication buffers",
    "temporary": "temporaries",
    "rounding": "rounding",
    "unmatched": "unmatched",
}
_TIMES = {
    "data_seconds": "data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimizer",
    "exposed_communication_seconds": "exposed communication",
    "idle_seconds": "pipeline idle",
    "other_seconds": "other",
}
_DETAILED = ("gathered", "communication", "temporary")
_LARGEST = 3  # of a run's blocks that are told by what made them


def memory(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    on_host = {name: header for name, header in _ON_HOST.items() if any(c.values(table, name))}
    names = (*c.MEMORY, *on_host, *_BESIDE)
    unit = c.byte_unit([value for name in names for value in c.values(table, name)])
    compared = c.baseline_names(table)
    columns: dict[str, list[str]] = {}
    for name, header in _MEMORY_HEADERS.items():
        columns[header] = c.scaled(c.values(table, name), unit)
        if compared:
            columns[f"× {header}"] = c.ratios(c.values(table, f"{name}_ratio"))
    columns["peak of the least rank"] = c.scaled(_least_peaks(records), unit)
    for name, header in (on_host | _BESIDE).items():
        columns[header] = c.scaled(c.values(table, name), unit)
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if columns:
        yield f"## Memory ({unit.name})"
        yield labelled(table, columns)
        yield (
            "Each column is the maximum over ranks. Parameters and optimizer at rest between steps, gradients and"
            " activations at their most; the parts need not be at their most at once, so they need not add up. The host"
            " process is the most that was ever resident of one, interpreter and libraries included."
            + "".join(_HOST_NOTES[name] for name in on_host)
            + (f" × is over {escape(compared)}." if compared else "")
        )


def _least_peaks(records: Sequence[Record]) -> list[float | None]:
    """The peak of the rank that needed least, where every rank's is recorded."""
    peaks = [[rank.get("peak_allocated_bytes") for rank in record.get("ranks") or []] for record in records]
    return [min(found) if found and None not in found else None for found in peaks]


def peak(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    """What fills the peak of the fullest rank: a part a column, and the largest of what is neither state nor kept."""
    names = {f"at_peak_{part}_bytes": header for part, header in _PARTS.items()}
    names = {name: header for name, header in names.items() if any(c.values(table, name))}
    if not names:
        return
    unit = c.byte_unit([value for name in (*names, "peak_allocated_bytes") for value in c.values(table, name)])
    columns = {header: c.scaled(c.values(table, name), unit) for name, header in names.items()}
    columns["peak"] = c.scaled(c.values(table, "peak_allocated_bytes"), unit)
    columns = {"in": [escape(phase or "") for phase in c.values(table, "peak_phase")], **columns}
    yield f"## What fills the peak ({unit.name})"
    yield labelled(table, columns, names=2)
    yield (
        "Every block of the fullest rank's memory at its fullest moment, by whose it is; the parts add up to the peak."
        " Gathered parameters are those made whole for compute; communication buffers are buckets, gradients on their"
        " way to be reduced, and copies of the communication backend; temporaries are all that no one keeps."
    )
    lines = [
        f"- **{escape(label)}**: {told}"
        for label, record in zip(c.values(table, "label"), records, strict=True)
        if (told := _largest(record))
    ]
    if lines:
        yield "The largest buffers and temporaries, by what they are or the operator that made them:"
        yield "\n".join(lines)


def _largest(record: Record) -> str:
    fullest = record["row"].get("peak_rank")
    ranks = [rank for rank in record.get("ranks") or [] if rank.get("rank") == fullest]
    found = ((rank.get("profiled") or {}).get("at_peak") or {} for rank in ranks)
    parts = [part for at_peak in found for part in at_peak.get("parts", ()) if part["role"] in _DETAILED]
    largest = sorted(parts, key=lambda part: -part["bytes"])[:_LARGEST]
    return ", ".join(f"{escape(part['what'])} {c.bytes_text(part['bytes'])}" for part in largest)


def time(table: pd.DataFrame) -> Iterator[str]:
    """The parts of the median step, a column each; they add up to it."""
    columns = {header: c.scaled(c.values(table, name), c.MILLISECONDS) for name, header in _TIMES.items()}
    columns = {header: cells for header, cells in columns.items() if any(cell not in ("", "0.00") for cell in cells)}
    if not columns:
        return
    columns["step"] = c.scaled(c.values(table, "step_seconds"), c.MILLISECONDS)
    columns["p95"] = c.scaled(c.values(table, "step_seconds_p95"), c.MILLISECONDS)
    columns["spread %"] = c.percents(c.values(table, "step_seconds_spread"))
    hidden = c.values(table, "overlapped_communication_seconds")
    columns["overlapped communication"] = c.scaled(hidden, c.MILLISECONDS)
    columns["processor seconds"] = c.scaled(c.values(table, "cpu_seconds"), c.ONE)
    columns["J/token"] = c.scaled(c.values(table, "joules_per_token"), c.ONE)
    yield "## Where the time of a step goes (ms)"
    yield labelled(table, {header: cells for header, cells in columns.items() if any(cells)})
    yield (
        "Of the slowest rank in the median step; data to other add up to the step. Communication is exposed while a"
        " collective is in flight and no operator computes, overlapped while one does: the shares are of two steps"
        " under torch's profiler, the phases of the timed steps. Other is what no phase accounts for. Spread is the"
        " interquartile range of the steps over their median; processor seconds are of all ranks for one step."
    )


def speed(table: pd.DataFrame) -> Iterator[str]:
    """Operations a step, what of them is the model's, and what share of the device's peak that is."""
    wanted, ran = c.values(table, "model_flops"), c.values(table, "hardware_flops")
    if not any(wanted):
        return
    again = [b / a if a and b else None for a, b in zip(wanted, ran, strict=True)]
    rates = c.values(table, "model_flops_per_second_per_device")
    unit, rate = c.operation_unit([*wanted, *ran]), c.operation_unit(rates)
    columns = {
        f"model {unit.name} a step": c.scaled(wanted, unit),
        f"ran {unit.name} a step": c.scaled(ran, unit),
        "ran / model": c.ratios(again),
        f"model {rate.name}/s a device": c.scaled(rates, rate),
        "MFU %": c.percents(c.values(table, "mfu")),
        "HFU %": c.percents(c.values(table, "hfu")),
    }
    yield "## Operations"
    yield labelled(table, {header: cells for header, cells in columns.items() if any(cells)})
    yield (
        "The model's operations are matrix products and attention (not halved for its causal mask), forward and twice"
        " as much backward; what ran was counted operator by operator on all ranks, second forwards and the scores that"
        " fused attention makes again included. MFU and HFU are over the dense peak of the device in the compute width,"
        " empty where that is not known."
    )
