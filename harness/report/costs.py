"""The report's sections on what a run costs: memory, what fills its peak, the parts of a step, operations."""

from collections.abc import Sequence

from harness.records import Record
from harness.report import comparison as c
from harness.report.charts import memory as memory_charts
from harness.report.charts import speed as speed_charts
from harness.report.document import Bullets, Prose, Section, labelled, section
from harness.report.parts import PEAK_PARTS, STEP_PARTS
from harness.report.view import View

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
_DETAILED = ("gathered", "communication", "temporary")
_LARGEST = 3  # of a run's blocks that are told by what made them


def memory(view: View) -> list[Section]:
    runs, table = view.middle_runs, view.middle_runs.table
    on_host = {name: header for name, header in _ON_HOST.items() if any(c.values(table, name))}
    names = (*c.MEMORY, *on_host, *_BESIDE)
    unit = c.byte_unit([value for name in names for value in c.values(table, name)])
    compared = c.baseline_names(table)
    columns: dict[str, list[str]] = {}
    for name, header in _MEMORY_HEADERS.items():
        columns[header] = c.scaled(c.values(table, name), unit)
        if compared:
            columns[f"× {header}"] = c.ratios(c.values(table, f"{name}_ratio"))
    columns["peak of the least rank"] = c.scaled(_least_peaks(runs.records), unit)
    for name, header in (on_host | _BESIDE).items():
        columns[header] = c.scaled(c.values(table, name), unit)
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    if not columns:
        return []
    return section(
        f"Memory ({unit.name})",
        labelled(table, columns),
        Prose(
            "Each column is the maximum over ranks. Parameters and optimizer at rest between steps, gradients and"
            " activations at their most; the parts need not be at their most at once, so they need not add up. The host"
            " process is the most that was ever resident of one, interpreter and libraries included."
            + "".join(_HOST_NOTES[name] for name in on_host)
            + (f" × is over {compared}." if compared else "")
        ),
    )


def _least_peaks(records: Sequence[Record]) -> list[float | None]:
    """The peak of the rank that needed least, where every rank's is recorded."""
    peaks = [[rank.get("peak_allocated_bytes") for rank in record.get("ranks") or []] for record in records]
    return [min(found) if found and None not in found else None for found in peaks]


def peak(view: View) -> list[Section]:
    """What fills the peak of the fullest rank: a part a column, and the largest of what is neither state nor kept."""
    runs, table = view.middle_runs, view.middle_runs.table
    names = {f"at_peak_{part}_bytes": header for part, header in PEAK_PARTS.items()}
    names = {name: header for name, header in names.items() if any(c.values(table, name))}
    if not names:
        return []
    unit = c.byte_unit([value for name in (*names, "peak_allocated_bytes") for value in c.values(table, name)])
    columns = {header: c.scaled(c.values(table, name), unit) for name, header in names.items()}
    columns["peak"] = c.scaled(c.values(table, "peak_allocated_bytes"), unit)
    columns = {"in": [phase or "" for phase in c.values(table, "peak_phase")], **columns}
    largest = [(label, _largest(record)) for label, record in zip(c.values(table, "label"), runs.records, strict=True)]
    blocks = [
        Prose("The largest buffers and temporaries, by what they are or the operator that made them:"),
        Bullets([(label, told) for label, told in largest if told]),
    ]
    return section(
        f"What fills the peak ({unit.name})",
        memory_charts.peak(view),
        labelled(table, columns, names=2),
        Prose(
            "Every block of the fullest rank's memory at its fullest moment, by whose it is; the parts add up to the"
            " peak. Gathered parameters are those made whole for compute; communication buffers are buckets, gradients"
            " on their way to be reduced, and copies of the communication backend; temporaries are all that no one"
            " keeps."
        ),
        *(blocks if any(told for _, told in largest) else ()),
    )


def _largest(record: Record) -> str:
    fullest = record["row"].get("peak_rank")
    ranks = [rank for rank in record.get("ranks") or [] if rank.get("rank") == fullest]
    found = ((rank.get("profiled") or {}).get("at_peak") or {} for rank in ranks)
    parts = [part for at_peak in found for part in at_peak.get("parts", ()) if part["role"] in _DETAILED]
    largest = sorted(parts, key=lambda part: -part["bytes"])[:_LARGEST]
    return ", ".join(f"{part['what']} {c.bytes_text(part['bytes'])}" for part in largest)


def time(view: View) -> list[Section]:
    """The parts of the median step, a column each; they add up to it."""
    table = view.middle_runs.table
    columns = {header: c.scaled(c.values(table, name), c.MILLISECONDS) for name, header in STEP_PARTS.items()}
    columns = {header: cells for header, cells in columns.items() if any(cell not in ("", "0.00") for cell in cells)}
    if not columns:
        return []
    columns["step"] = c.scaled(c.values(table, "step_seconds"), c.MILLISECONDS)
    columns["p95"] = c.scaled(c.values(table, "step_seconds_p95"), c.MILLISECONDS)
    columns["spread %"] = c.percents(c.values(table, "step_seconds_spread"))
    hidden = c.values(table, "overlapped_communication_seconds")
    columns["overlapped communication"] = c.scaled(hidden, c.MILLISECONDS)
    columns["processor seconds"] = c.scaled(c.values(table, "cpu_seconds"), c.ONE)
    columns["J/token"] = c.scaled(c.values(table, "joules_per_token"), c.ONE)
    return section(
        "Where the time of a step goes (ms)",
        speed_charts.step(view),
        labelled(table, {header: cells for header, cells in columns.items() if any(cells)}),
        Prose(
            "Of the slowest rank in the median step; data to other add up to the step. Communication is exposed while"
            " a collective is in flight and no operator computes, overlapped while one does: the shares are of two"
            " steps under torch's profiler, the phases of the timed steps. Other is what no phase accounts for. Spread"
            " is the interquartile range of the steps over their median; processor seconds are of all ranks for one"
            " step."
        ),
    )


def operations(view: View) -> list[Section]:
    """Operations a step, what of them is the model's, and what share of the device's peak that is."""
    table = view.middle_runs.table
    wanted, ran = c.values(table, "model_flops"), c.values(table, "hardware_flops")
    if not any(wanted):
        return []
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
    return section(
        "Operations",
        labelled(table, {header: cells for header, cells in columns.items() if any(cells)}),
        Prose(
            "The model's operations are matrix products and attention (not halved for its causal mask), forward and"
            " twice as much backward; what ran was counted operator by operator on all ranks, second forwards and the"
            " scores that fused attention makes again included. MFU and HFU are over the dense peak of the device in"
            " the compute width, empty where that is not known."
        ),
    )
