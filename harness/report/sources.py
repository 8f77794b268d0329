"""One figure from three sources: the plan's formula, the simulation of the real code, and a measurement."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from operator import attrgetter, itemgetter

from harness.config.fingerprint import result_affecting_keys
from harness.config.stack import load_stack
from harness.metrics.columns import slowest_simulated_time
from harness.metrics.memory import peak_rank
from harness.metrics.step_time import PHASE_COLUMNS
from harness.records.rank_report import OUTSIDE_PHASES, SimulatedTime
from harness.records.schema import Record
from harness.report.columns import ShownColumn, from_lines, line_table
from harness.report.comparability import group_by, is_measured, key_text
from harness.report.document import BulletList, Paragraph, Section, section
from harness.report.lines import Line
from harness.report.text import MILLISECONDS, byte_unit, format_numbers, sentence
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
    ok = [line for line in view.lines if line.ok]
    measured = {(configuration_key(line.record), line.get("measured_on")): line for line in ok if is_measured(line.row)}
    simulated = [line for line in ok if line.get("launch") == "simulated"]
    pairs = [(line, measured.get((configuration_key(line.record), line.get("measured_on")))) for line in simulated]
    timed = [pair for pair in pairs if pair[0].get("step_seconds")]
    if not pairs:
        return []
    has_measurement = any(other for _, other in pairs)
    differences = [
        (line.label, text)
        for line in simulated
        for text in (peak_difference(line.record), step_difference(line.record))
        if text
    ]
    return section(
        "Formula, simulation and measurement" if has_measurement else "Formula and simulation",
        line_table(simulated, _memory_columns(pairs), "Peak memory"),
        line_table([line for line, _ in timed], _time_columns(timed), "Step time"),
        Paragraph(
            sentence(
                "sources",
                is_measured=has_measurement,
                has_interval=any(line.record.predicted_step for line, _ in timed),
            )
        ),
        BulletList(differences) if differences else None,
    )


def configuration_key(record: Record) -> str:
    """Return a key that is equal for the simulation and the measurement of one configuration, on any device."""
    values = result_affecting_keys(record.config)
    shared = {key: value for key, value in values.items() if key not in _DIFFERENT_BY_SOURCE}
    nodes = (record.config.get("cluster") or {}).get("nodes")
    return key_text([shared, nodes, record.row.get("world_size")])


def _memory_columns(pairs: Sequence[tuple[Line, Line | None]]) -> list[ShownColumn]:
    simulated = [line for line, _ in pairs]
    formula = from_lines(simulated, "predicted_peak_bytes", "formula {unit}")
    peak = from_lines(simulated, "peak_allocated_bytes", "simulated {unit}")
    sizes = [other and other.get("peak_allocated_bytes") for _, other in pairs]
    measured = ShownColumn("measured {unit}", sizes, "bytes")
    return [
        *(formula, peak, _change("simulation to formula %", peak, formula)),
        from_lines(simulated, "peak_reserved_bytes", "reserved, simulated {unit}"),
        *(measured, _change("simulation to measurement %", peak, measured)),
    ]


def _time_columns(pairs: Sequence[tuple[Line, Line | None]]) -> list[ShownColumn]:
    """Return the columns of times; a measured time that something disturbed is to be ignored."""
    simulated = [line for line, _ in pairs]
    ends = [
        (line.record.predicted_step or {}).get(end) for line in simulated for end in ("low_seconds", "high_seconds")
    ]
    texts = format_numbers(ends, MILLISECONDS)  # together, with as many decimals
    intervals = [f"{low}–{high}".strip("–") for low, high in zip(texts[::2], texts[1::2], strict=True)]
    formula = from_lines(simulated, "predicted_step_seconds", "formula ms")
    step = from_lines(simulated, "step_seconds", "simulated ms")
    ignored = [other is not None and other.speed.is_disturbed for _, other in pairs]
    times = [other and other.get("step_seconds") for _, other in pairs]
    return [
        *(formula, ShownColumn("interval of the formula ms", intervals), step),
        _change("simulation to formula %", step, formula),
        ShownColumn("measured ms", times, "ms", ignored=ignored),
    ]


def _change(header: str, column: ShownColumn, other: ShownColumn) -> ShownColumn:
    cells = [a / b - 1 if a and b else None for a, b in zip(column.cells, other.cells, strict=True)]
    return ShownColumn(header, cells, "change")


def peak_difference(record: Record) -> str:
    """Return what fills the simulated peak if it is outside the formula's interval; '' if it is inside."""
    formula, simulated = record.row.get("predicted_peak_bytes"), record.row.get("peak_allocated_bytes")
    low, high = load_stack("harness").memory.measured_over_predicted or (1.0, 1.0)
    if not formula or not simulated or low <= simulated / formula <= high:
        return ""
    at_peak = peak_rank(record.ranks).profiled.at_peak
    largest = nlargest(_MOST_BLOCKS, at_peak.parts if at_peak else (), attrgetter("bytes"))
    unit = byte_unit([part.bytes for part in largest])
    blocks = [f"{part.what} {format_numbers([part.bytes], unit)[0]} {unit.name}" for part in largest]
    return sentence(
        "simulated_peak",
        ratio=simulated / formula,
        low=low,
        high=high,
        phase=record.row.get("peak_phase"),
        blocks=blocks,
    )


def step_difference(record: Record) -> str:
    """Return where and by which operators a simulated step differs from the plan; '' if it is in the plan's interval.

    Nothing is returned either where the step has no time, or the record has no plan of it.
    """
    planned, simulated = record.predicted_step, slowest_simulated_time(record.ranks)
    if (
        planned is None
        or simulated is None
        or planned["low_seconds"] <= simulated.step_seconds <= planned["high_seconds"]
    ):
        return ""
    # Planned waits for the host are in forward, backward and the optimizer.
    parts = largest_differences(_parts(planned.items(), planned["exposed_seconds"]), simulated_parts(simulated))
    return sentence(
        "simulated_step",
        simulated=simulated,
        planned=planned,
        parts=parts,
        is_waiting=_PARTS["waiting_seconds"] in parts,
        operators=longest_operators(simulated),
        outside=OUTSIDE_PHASES,
        least_share=_LEAST_SHARE,
    )


def simulated_parts(simulated: SimulatedTime) -> dict[str, float]:
    """Return the simulated seconds of a step by part, which add up to the step."""
    phases = [(PHASE_COLUMNS[phase], seconds) for phase, seconds in simulated.phase_seconds.items()]
    others = {
        "copy_seconds": simulated.copy_seconds,
        "bubble_seconds": simulated.bubble_seconds,
        "waiting_seconds": simulated.idle_seconds - simulated.bubble_seconds,
    }
    return _parts([*phases, *others.items()], simulated.exposed_seconds)


def _parts(columns: Iterable[tuple[str, float]], exposed_seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by part, of computing by its columns and of exposed communication by its axes.

    What runs along several axes counts to the outermost, as in the plan.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for column, seconds in columns:
        if column in _PARTS:
            sums[_PARTS[column]] += seconds
    for axes, seconds in exposed_seconds.items():
        where = "among all ranks" if axes == "world" else f"along {axes.partition('+')[0]}"
        sums[f"exposed communication {where}"] += seconds
    return sums


def largest_differences(planned: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the simulated and the planned seconds of the parts in which they differ most, by name."""
    pairs = {name: (simulated.get(name, 0.0), planned.get(name, 0.0)) for name in {**planned, **simulated}}
    changes = {name: abs(own - other) for name, (own, other) in pairs.items()}
    smallest = _SMALL_SHARE * sum(changes.values())
    largest = nlargest(_MOST_PARTS, changes, changes.__getitem__)
    return {name: pairs[name] for name in largest if changes[name] >= smallest > 0}


def longest_operators(simulated: SimulatedTime) -> dict[str, list[tuple[str, float]]]:
    """Return the operators that compute and that communicate longest, each with its phase, and their seconds."""
    ran = [operator for operator in simulated.operator_seconds.items() if operator[1]]
    sent = simulated.communication_operators
    by_verb = group_by(ran, lambda operator: "communicate" if operator[0] in sent else "compute")
    return {
        verb: nlargest(_MOST_OPERATORS, by_verb[verb], itemgetter(1))
        for verb in ("compute", "communicate")
        if verb in by_verb
    }
