"""One figure from three sources: the plan's formula, the simulation of the real code, and a measurement."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.fingerprint import result_affecting_keys
from harness.config.stack import load_stack
from harness.metrics.simulation import slowest_simulated_time
from harness.metrics.step_time import PHASE_COLUMNS
from harness.records.rank_report import OUTSIDE_PHASES, SimulatedTime
from harness.records.schema import Record
from harness.report.columns import ShownColumn, labelled_table
from harness.report.comparability import is_measured, key_text
from harness.report.document import BulletList, Paragraph, Section, Table, section
from harness.report.frame import labelled
from harness.report.sentences import sentence
from harness.report.speeds import speed_of
from harness.report.text import MILLISECONDS, byte_unit, duration_text, format_numbers, percent_text
from harness.report.view import View

_DIFFERENT_BY_SOURCE = ("launch", "simulate", "cluster", "repeat")  # what a simulation and its measurement differ in
_MOST_BLOCKS, _MOST_PARTS, _MOST_OPERATORS = 4, 3, 3  # of a peak, of a step and of each kind that are named
_SMALL_SHARE = 0.1  # a part with a smaller share of all differences is not named
_LEAST_SHARE = 0.001  # of a step that is written as a number

# The parts of a step by the columns that they count to.
_PARTS = {
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "the optimizer",
    "other_seconds": "the rest of the step",
    "bubble_seconds": "the pipeline's bubble",
    "copy_seconds": "copies between device and host",
    "data_seconds": "the rest of the step",
    "waiting_seconds": "waiting for the host",
}


def sources(view: View) -> list[Section]:
    """Return the section on simulated runs: their figures beside the formula's and those of measured runs."""
    simulated = [
        (label, record)
        for label, record in labelled(view.line_medians, view.lines)
        if record.row.get("launch") == "simulated" and record.status == "ok"
    ]
    measured = {
        _configuration(record): record for record in view.lines if is_measured(record.row) and record.status == "ok"
    }
    if not simulated:
        return []
    labels, records = [label for label, _ in simulated], [record for _, record in simulated]
    pairs = [measured.get(_configuration(record)) for record in records]
    words = sentence(
        "sources",
        is_measured=any(pairs),
        is_on_gpu=any(record.row.get("measured_on") != "cpu" for record in records),
        has_interval=any(record.predicted_step and record.row.get("step_seconds") for record in records),
    )
    texts = [
        (label, text) for label, record in simulated for text in (peak_difference(record), step_difference(record))
    ]
    differences = [(label, text) for label, text in texts if text]
    return section(
        "Formula, simulation and measurement" if any(pairs) else "Formula and simulation",
        _memory_table(labels, records, pairs),
        _time_table(labels, records, pairs),
        Paragraph(words),
        BulletList(differences) if differences else None,
    )


def _configuration(record: Record) -> str:
    """Return a key that is equal for the simulation and the measurement of one configuration."""
    values = result_affecting_keys(record.config)
    shared = {key: value for key, value in values.items() if key not in _DIFFERENT_BY_SOURCE}
    nodes = (record.config.get("cluster") or {}).get("nodes")
    return key_text([shared, nodes, record.row.get("world_size"), record.row.get("measured_on")])


def _memory_table(labels: Sequence[str], records: Sequence[Record], pairs: Sequence[Record | None]) -> Table | None:
    formula, simulated = _column(records, "predicted_peak_bytes"), _column(records, "peak_allocated_bytes")
    reserved, measured = _column(records, "peak_reserved_bytes"), _column(pairs, "peak_allocated_bytes")
    columns = [
        ShownColumn("formula {unit}", formula, "bytes"),
        ShownColumn("simulated {unit}", simulated, "bytes"),
        ShownColumn("simulation to formula %", _changes(simulated, formula), "change"),
        ShownColumn("reserved, simulated {unit}", reserved, "bytes"),
        ShownColumn("measured {unit}", measured, "bytes"),
        ShownColumn("simulation to measurement %", _changes(simulated, measured), "change"),
    ]
    return labelled_table(labels, columns, caption="Peak memory")


def _time_table(labels: Sequence[str], records: Sequence[Record], pairs: Sequence[Record | None]) -> Table | None:
    """Return the table of times, of the records whose steps have a simulated one."""
    timed = [record if record.row.get("step_seconds") else None for record in records]
    pairs = [pair if record else None for record, pair in zip(timed, pairs, strict=True)]
    formula, simulated = _column(timed, "predicted_step_seconds"), _column(timed, "step_seconds")
    steps = [record.predicted_step if record else None for record in timed]
    lows, highs = ([step[end] if step else None for step in steps] for end in ("low_seconds", "high_seconds"))
    texts = format_numbers([*lows, *highs], MILLISECONDS)  # together, with as many decimals
    intervals = [f"{low}–{high}".strip("–") for low, high in zip(texts[: len(steps)], texts[len(steps) :], strict=True)]
    columns = [
        ShownColumn("formula ms", formula, "ms"),
        ShownColumn("interval of the formula ms", intervals),
        ShownColumn("simulated ms", simulated, "ms"),
        ShownColumn("simulation to formula %", _changes(simulated, formula), "change"),
        ShownColumn("measured ms", _column(pairs, "step_seconds"), "ms", is_timed=True),
    ]
    speeds = [pair and speed_of(pair.runs or [pair]) for pair in pairs]
    return labelled_table(labels, columns, [bool(speed and speed.is_disturbed) for speed in speeds], "Step time")


def _column(records: Sequence[Record | None], name: str) -> list[Any]:
    return [record and record.row.get(name) for record in records]


def _changes(values: Sequence[Any], others: Sequence[Any]) -> list[float | None]:
    return [value / other - 1 if value and other else None for value, other in zip(values, others, strict=True)]


def peak_difference(record: Record) -> str:
    """Return what fills the simulated peak if it is outside the formula's interval; '' if it is inside."""
    formula, simulated = record.row.get("predicted_peak_bytes"), record.row.get("peak_allocated_bytes")
    low, high = load_stack("harness").memory.measured_over_predicted or (1.0, 1.0)
    if not formula or not simulated or low <= simulated / formula <= high:
        return ""
    at_peak = next((rank.profiled.at_peak for rank in record.ranks if rank.rank == record.row.get("peak_rank")), None)
    largest = sorted(at_peak.parts if at_peak else (), key=lambda part: -part.bytes)[:_MOST_BLOCKS]
    unit = byte_unit([part.bytes for part in largest])
    blocks = [f"{part.what} {format_numbers([part.bytes], unit)[0]} {unit.name}" for part in largest]
    phase = record.row.get("peak_phase")
    return sentence("simulated_peak", ratio=simulated / formula, low=low, high=high, phase=phase, blocks=blocks)


def step_difference(record: Record) -> str:
    """Return where and by which operators a simulated step differs from the plan; '' if it is in the plan's interval.

    Nothing is returned either where the step has no time, or the record has no plan of it.
    """
    planned, simulated = record.predicted_step, slowest_simulated_time(record.ranks)
    if planned is None or simulated is None:
        return ""
    if planned["low_seconds"] <= simulated.step_seconds <= planned["high_seconds"]:
        return ""
    parts = largest_differences(planned_parts(planned), simulated_parts(simulated))
    return sentence(
        "simulated_step",
        step_seconds=simulated.step_seconds,
        planned=planned,
        parts=parts,
        is_waiting=_PARTS["waiting_seconds"] in parts,
        operators=longest_operators(simulated),
    )


def planned_parts(planned: Mapping[str, Any]) -> dict[str, float]:
    """Return the planned seconds of a step by part; waits for the host are in forward, backward and the optimizer."""
    parts = {name: planned[column] for column, name in _PARTS.items() if column in planned}
    return parts | _exposed_parts(planned["exposed_seconds"])


def simulated_parts(simulated: SimulatedTime) -> dict[str, float]:
    """Return the simulated seconds of a step by part, which add up to the step."""
    parts = _exposed_parts(simulated.exposed_seconds)
    for phase, seconds in simulated.phase_seconds.items():
        parts[_PARTS[PHASE_COLUMNS[phase]]] += seconds
    parts[_PARTS["copy_seconds"]] = simulated.copy_seconds
    parts[_PARTS["bubble_seconds"]] = simulated.bubble_seconds
    parts[_PARTS["waiting_seconds"]] = simulated.idle_seconds - simulated.bubble_seconds
    return parts


def _exposed_parts(seconds: Mapping[str, float]) -> defaultdict[str, float]:
    """Return exposed communication by part; what runs along several axes counts to the outermost, as in the plan."""
    parts: defaultdict[str, float] = defaultdict(float)
    for axes, own in seconds.items():
        where = "among all ranks" if axes == "world" else f"along {axes.partition('+')[0]}"
        parts[f"exposed communication {where}"] += own
    return parts


def largest_differences(planned: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the simulated and the planned seconds of the parts in which they differ most, by name."""
    pairs = {name: (simulated.get(name, 0.0), planned.get(name, 0.0)) for name in {**planned, **simulated}}
    changes = {name: abs(own - other) for name, (own, other) in pairs.items()}
    largest = sorted(changes, key=lambda name: -changes[name])[:_MOST_PARTS]
    smallest = _SMALL_SHARE * sum(changes.values())
    return {name: pairs[name] for name in largest if changes[name] >= smallest > 0}


def longest_operators(simulated: SimulatedTime) -> dict[str, list[str]]:
    """Return the operators that compute and that communicate longest, with their seconds and share of the step."""
    longest: dict[str, list[str]] = {"compute": [], "communicate": []}
    for key, seconds in sorted(simulated.operator_seconds.items(), key=lambda operator: -operator[1]):
        phase, _, name = key.partition("/")
        where = "outside of the phases" if phase == OUTSIDE_PHASES else f"in {phase.replace('_', ' ')}"
        share = seconds / simulated.step_seconds
        share_text = percent_text(share) if share >= _LEAST_SHARE else f"less than {percent_text(_LEAST_SHARE)}"
        texts = longest["communicate" if key in simulated.communication_operators else "compute"]
        if seconds and len(texts) < _MOST_OPERATORS:
            texts.append(f"{name} {where} ({duration_text(seconds)}, {share_text} of the step)")
    return {verb: texts for verb, texts in longest.items() if texts}
