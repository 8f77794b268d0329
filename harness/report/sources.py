"""One figure from three sources: the plan's formula, the simulation of the real code, and a measurement."""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.config.fingerprint import result_affecting_keys
from harness.config.stack import load_stack
from harness.records.schema import Record
from harness.report.comparability import is_measured, key_text
from harness.report.document import BulletList, Disturbed, Paragraph, Section, Table, section
from harness.report.frame import column_values
from harness.report.speeds import speed_of
from harness.report.step_differences import step_difference
from harness.report.text import MILLISECONDS, byte_unit, format_numbers
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
        for label, record in zip(column_values(view.line_medians, "label"), view.lines, strict=True)
        if record.row.get("launch") == "simulated" and record.status == "ok"
    ]
    if not simulated:
        return []
    measured = {_configuration(record): record for record in view.lines if _is_measured(record)}
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


def _is_measured(record: Record) -> bool:
    return is_measured(record.row) and record.status == "ok"


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
