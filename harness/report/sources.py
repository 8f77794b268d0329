"""One figure from three sources: the plan's formula, the simulation of the real code, and a measurement."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.config.fingerprint import result_affecting_keys
from harness.config.stack import load_stack
from harness.metrics.simulation import slowest_simulated_time
from harness.metrics.step_time import PHASE_COLUMNS
from harness.records.rank_report import OUTSIDE_PHASES, SimulatedTime
from harness.records.schema import PredictedStepEntry, Record
from harness.report.comparability import is_measured, key_text
from harness.report.document import BulletList, Disturbed, Paragraph, Section, Table, section
from harness.report.frame import labelled
from harness.report.speeds import speed_of
from harness.report.text import MILLISECONDS, byte_unit, duration_text, format_numbers, join_words, percent_text
from harness.report.view import View

_DIFFERENT_BY_SOURCE = ("launch", "simulate", "cluster", "repeat")  # what a simulation and its measurement differ in

PARTS = 4  # of a peak that are named where formula and simulation differ

EXPLANATION = "The formula is the plan's, and the simulation ran the code of one rank on tensors without memory."

MEASURED = "The measurement is of a run of the same configuration on the same kind of device."

WITHOUT_WORKSPACES = (
    "On a GPU the allocated bytes of a simulation have no workspaces of matrix products, which the formula has."
)

INTERVAL = "Nine of ten measured steps are to lie in the interval of the formula."


def sources(view: View) -> list[Section]:
    """Return the section on simulated runs: their figures beside the formula's and those of measured runs."""
    simulated = [
        (label, record)
        for label, record in labelled(view.line_medians, view.lines)
        if record.row.get("launch") == "simulated" and record.status == "ok"
    ]
    if not simulated:
        return []
    measured = {
        _configuration(record): record for record in view.lines if is_measured(record.row) and record.status == "ok"
    }
    records = [record for _, record in simulated]
    pairs = [measured.get(_configuration(record)) for record in records]
    labels = [label for label, _ in simulated]
    tables = (
        _table("Peak memory", labels, _memory_columns(records, pairs)),
        _table("Step time", labels, _time_columns(records, pairs)),
    )
    differences = [
        (label, text)
        for label, record in simulated
        for text in (peak_difference(record), step_difference(record))
        if text
    ]
    return section(
        "Formula, simulation and measurement" if any(pairs) else "Formula and simulation",
        *tables,
        Paragraph(" ".join(_explanation(records, pairs))),
        BulletList(differences) if differences else None,
    )


def _table(caption: str, labels: Sequence[str], columns: dict[str, list[str]]) -> Table | None:
    """Return a table of the columns and the rows that have values; None if there are none."""
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    rows = [[label, *cells] for label, *cells in zip(labels, *columns.values(), strict=True) if any(cells)]
    return Table(["run", *columns], rows, caption=caption) if rows else None


def _explanation(records: Sequence[Record], pairs: Sequence[Record | None]) -> Iterator[str]:
    """Yield a sentence on each source that the tables have."""
    yield EXPLANATION
    if any(pairs):
        yield MEASURED
    if any(record.row.get("measured_on") != "cpu" for record in records):
        yield WITHOUT_WORKSPACES
    if any(record.predicted_step and record.row.get("step_seconds") for record in records):
        yield INTERVAL


def _configuration(record: Record) -> str:
    """Return a key that is equal for the simulation and the measurement of one configuration."""
    values = result_affecting_keys(record.config)
    shared = {key: value for key, value in values.items() if key not in _DIFFERENT_BY_SOURCE}
    nodes = (record.config.get("cluster") or {}).get("nodes")
    return key_text([shared, nodes, record.row.get("world_size"), record.row.get("measured_on")])


def _memory_columns(records: Sequence[Record], pairs: Sequence[Record | None]) -> dict[str, list[str]]:
    formula, simulated = _column(records, "predicted_peak_bytes"), _column(records, "peak_allocated_bytes")
    reserved, measured = _column(records, "peak_reserved_bytes"), _column(pairs, "peak_allocated_bytes")
    unit = byte_unit([*formula, *simulated, *reserved, *measured])
    return {
        f"formula {unit.name}": format_numbers(formula, unit),
        f"simulated {unit.name}": format_numbers(simulated, unit),
        "simulation to formula %": _differences(simulated, formula),
        f"reserved, simulated {unit.name}": format_numbers(reserved, unit),
        f"measured {unit.name}": format_numbers(measured, unit),
        "simulation to measurement %": _differences(simulated, measured) if any(measured) else [""] * len(records),
    }


def _time_columns(records: Sequence[Record], pairs: Sequence[Record | None]) -> dict[str, list[str]]:
    """Return the columns of times, of the records whose steps have a simulated one."""
    timed = [record if record.row.get("step_seconds") else None for record in records]
    pairs = [pair if record else None for record, pair in zip(timed, pairs, strict=True)]
    formula, simulated = _column(timed, "predicted_step_seconds"), _column(timed, "step_seconds")
    measured = format_numbers(_column(pairs, "step_seconds"), MILLISECONDS)
    return {
        "formula ms": format_numbers(formula, MILLISECONDS),
        "interval of the formula ms": _step_intervals(timed),
        "simulated ms": format_numbers(simulated, MILLISECONDS),
        "simulation to formula %": _differences(simulated, formula),
        "measured ms": [_marked(cell, pair) for cell, pair in zip(measured, pairs, strict=True)],
    }


def _marked(cell: str, record: Record | None) -> str:
    """Return a measured time, as Disturbed where it is not to be compared."""
    speed = None if record is None else speed_of(record.runs or [record])
    return Disturbed(cell) if speed is not None and speed.is_disturbed else cell


def _step_intervals(records: Sequence[Record | None]) -> list[str]:
    steps = [None if record is None else record.predicted_step for record in records]
    ends = [step and step[end] for end in ("low_seconds", "high_seconds") for step in steps]
    texts = format_numbers(ends, MILLISECONDS)
    lows, highs = texts[: len(steps)], texts[len(steps) :]
    return [f"{low}–{high}" if low and high else "" for low, high in zip(lows, highs, strict=True)]


def _column(records: Sequence[Record | None], name: str) -> list[Any]:
    return [None if record is None else record.row.get(name) for record in records]


def _differences(values: Sequence[Any], others: Sequence[Any]) -> list[str]:
    return [
        f"{100 * (value / other - 1):+.1f}" if value and other else ""
        for value, other in zip(values, others, strict=True)
    ]


def peak_difference(record: Record) -> str:
    """Return what fills the simulated peak if it is outside the formula's interval; '' if it is inside."""
    formula, simulated = record.row.get("predicted_peak_bytes"), record.row.get("peak_allocated_bytes")
    low, high = load_stack("harness").memory.measured_over_predicted or (1.0, 1.0)
    if not formula or not simulated or low <= simulated / formula <= high:
        return ""
    fullest = next((rank for rank in record.ranks if rank.rank == record.row.get("peak_rank")), None)
    at_peak = None if fullest is None else fullest.profiled.at_peak
    largest = sorted(at_peak.parts if at_peak else (), key=lambda part: -part.bytes)[:PARTS]
    unit = byte_unit([part.bytes for part in largest])
    texts = [f"{part.what} {format_numbers([part.bytes], unit)[0]} {unit.name}" for part in largest]
    filled = f"; the largest parts of it, in {record.row.get('peak_phase')}, are {', '.join(texts)}" if texts else ""
    ratio = f"{simulated / formula:.3f}"
    return f"the simulated peak is {ratio} of the formula's, outside its interval of {low:g} to {high:g}{filled}."


LONGEST = 3  # operators that are named of each kind

MOST_PARTS = 3  # that are named

SMALL_SHARE = 0.1  # a part with a smaller share of all differences is not named

SMALLEST_SHARE = 0.001  # of a step that is written as a number

COPIES = "copies between device and host"

WAITS = "waiting for the host"

PLANNED_WAITS = (
    "The plan counts waits for the host to forward and backward, and those for an update on the host to the optimizer."
)

# What the parts of a step are called, by the columns of a row that its phases count to.
_PART_OF_COLUMN = {
    "data_seconds": "the rest of the step",
    "other_seconds": "the rest of the step",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "the optimizer",
}


def step_difference(record: Record) -> str:
    """Return where and by which operators a simulated step differs from the plan; '' if it is in the plan's interval.

    Nothing is returned either where the step has no time, or the record has no plan of it.
    """
    planned, simulated = record.predicted_step, slowest_simulated_time(record.ranks)
    if planned is None or simulated is None:
        return ""
    low, high = planned["low_seconds"], planned["high_seconds"]
    if low <= simulated.step_seconds <= high:
        return ""
    sentences = [
        f"the simulated step takes {duration_text(simulated.step_seconds)}, outside the interval of"
        f" {duration_text(low)} to {duration_text(high)} around the {duration_text(planned['step_seconds'])} of the"
        " formula.",
        *parts_sentences(planned_parts(planned), simulated_parts(simulated)),
        *operator_sentences(simulated),
    ]
    return " ".join(sentences)


def planned_parts(planned: PredictedStepEntry) -> dict[str, float]:
    """Return the planned seconds of a step by part; waits for the host are in those that PLANNED_WAITS names."""
    return {
        "forward": planned["forward_seconds"],
        "backward": planned["backward_seconds"],
        "the optimizer": planned["optimizer_seconds"],
        "the rest of the step": planned["other_seconds"],
        "the pipeline's bubble": planned["bubble_seconds"],
        COPIES: planned["copy_seconds"],
        **_exposed_parts(planned["exposed_seconds"]),
    }


def simulated_parts(simulated: SimulatedTime) -> dict[str, float]:
    """Return the simulated seconds of a step by part, which add up to the step."""
    parts = _exposed_parts(simulated.exposed_seconds)
    for phase, seconds in simulated.phase_seconds.items():
        name = _PART_OF_COLUMN[PHASE_COLUMNS[phase]]
        parts[name] = parts.get(name, 0.0) + seconds
    parts[COPIES] = simulated.copy_seconds
    parts["the pipeline's bubble"] = simulated.bubble_seconds
    parts[WAITS] = simulated.idle_seconds - simulated.bubble_seconds
    return parts


def parts_sentences(planned: Mapping[str, float], simulated: Mapping[str, float]) -> list[str]:
    """Return a sentence on the parts in which the seconds differ most."""
    names = dict.fromkeys((*planned, *simulated))
    changes = {name: simulated.get(name, 0.0) - planned.get(name, 0.0) for name in names}
    whole = sum(abs(change) for change in changes.values())
    largest = sorted(changes, key=lambda name: -abs(changes[name]))[:MOST_PARTS]
    named = [name for name in largest if abs(changes[name]) >= SMALL_SHARE * whole > 0]
    if not named:
        return []
    texts = [
        f"{name}, {_seconds(simulated.get(name))} simulated and {_seconds(planned.get(name))} planned" for name in named
    ]
    verb, noun = ("is", "part") if len(texts) == 1 else ("are", "parts")
    sentences = [f"The {noun} that differ{'s' if verb == 'is' else ''} most {verb} {'; '.join(texts)}."]
    if WAITS in named:
        sentences.append(PLANNED_WAITS)
    return sentences


def operator_sentences(simulated: SimulatedTime) -> list[str]:
    """Return a sentence on the operators that compute longest, and one on those that communicate longest."""
    communicating = set(simulated.communication_operators)
    kinds = (
        ("compute", {key: s for key, s in simulated.operator_seconds.items() if key not in communicating}),
        ("communicate", {key: s for key, s in simulated.operator_seconds.items() if key in communicating}),
    )
    sentences = [
        f"The operators that {verb} longest are {join_words(_operator_texts(seconds, simulated.step_seconds))}."
        for verb, seconds in kinds
        if any(seconds.values())
    ]
    return [*sentences, "The seconds of an operator are those of its kernels if each runs alone."] if sentences else []


def _operator_texts(seconds: Mapping[str, float], step_seconds: float) -> Sequence[str]:
    longest = sorted(seconds, key=lambda key: -seconds[key])[:LONGEST]
    return [
        f"{_operator(key)} ({duration_text(seconds[key])}, {_share(seconds[key] / step_seconds)} of the step)"
        for key in longest
        if seconds[key]
    ]


def _operator(key: str) -> str:
    """Return the operator of a key such as forward/mm in words."""
    phase, _, name = key.partition("/")
    return f"{name} outside of the phases" if phase == OUTSIDE_PHASES else f"{name} in {phase.replace('_', ' ')}"


def _share(share: float) -> str:
    return percent_text(share) if share >= SMALLEST_SHARE else f"less than {percent_text(SMALLEST_SHARE)}"


def _exposed_parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return exposed communication by part; what runs along several axes counts to the outermost, as in the plan."""
    parts: dict[str, float] = {}
    for axes, own in seconds.items():
        where = "among all ranks" if axes == "world" else f"along {axes.partition('+')[0]}"
        name = f"exposed communication {where}"
        parts[name] = parts.get(name, 0.0) + own
    return parts


def _seconds(seconds: float | None) -> str:
    return duration_text(seconds) if seconds else "nothing"
