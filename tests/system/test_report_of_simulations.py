"""The report of simulated rows: their figures beside others, and no sentence that holds of measured rows alone."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

from harness.records.schema import Record
from harness.report.claims import claims
from harness.report.document import Chart, Disturbed, Section, Table, charts
from harness.report.sections import sections
from harness.report.view import View
from tests.support.example_records import MIB, record_of, row
from tests.support.tables import page_text

STEP: dict[str, Any] = {
    **dict(zip(("step_seconds", "low_seconds", "high_seconds"), (0.1, 0.08, 0.13), strict=True)),
    "forward_seconds": 0.03,
    "backward_seconds": 0.06,
    "optimizer_seconds": 0.01,
    "exposed_seconds": {},
    **dict.fromkeys(("other_seconds", "bubble_seconds", "copy_seconds"), 0.0),
}


def on_cpu(number: int, launch: str, **changes: Any) -> Record:
    """Return a DDP record of this launch on a CPU, whose simulations have no speed."""
    times = dict.fromkeys(("step_seconds", "tokens_per_second", "tokens_per_second_per_device"))
    more = {"predicted_peak_bytes": 19 * MIB} | (times if launch == "simulated" else {}) | changes
    return record_of(row(number, "ddp", "torch", 0, launch=launch, **more))


def on_h100(number: int, launch: str = "simulated", config: dict[str, Any] | None = None, **changes: Any) -> Record:
    """Return a DDP record on H100 with a planned step."""
    cells = {"measured_on": "NVIDIA H100 80GB HBM3", "predicted_step_seconds": 0.1, "predicted_peak_bytes": 19 * MIB}
    record = record_of(row(number, "ddp", "torch", 0, launch=launch, **cells | changes))
    return dataclasses.replace(record, predicted_step=STEP, config=config or {})


def layers(spec: Any) -> Iterator[dict[str, Any]]:
    """Yield all layers with a mark of a chart."""
    if isinstance(spec, dict):
        yield from [spec] if "mark" in spec else []
        for inner in spec.values():
            yield from layers(inner)
    for inner in spec if isinstance(spec, list) else ():
        yield from layers(inner)


@pytest.mark.parametrize("measured", [0, 1, 2])
def test_charts_and_their_tables_say_what_was_simulated(measured: int) -> None:
    """Of two runs none, one or both are measured; charts of measured runs alone and of claims have no simulations."""
    figures = {**PARTS, "step_seconds": 0.09, "communication_bytes": 10**6, "memory_limit_bytes": 80 * MIB}
    entries = [on_h100(n, "processes" if n <= measured else "simulated", micro_batch=n, **figures) for n in (1, 2)]
    shown = [chart for chart in charts(sections(View("demo", entries))) if chart.name not in ("predicted", "papers")]
    assert len(shown) > 1 and shown[0].name == "first"
    notes = {0: "Simulated, not measured", 1: "Dashed: simulated", 2: "NVIDIA"}
    for chart in shown:
        subtitle, caption = " ".join(chart.spec["title"]["subtitle"]), chart.table.caption
        assert subtitle.startswith(notes[measured]) or (measured == 2 and "simulated" not in subtitle.lower())
        is_simulated = [bool(datum.get("simulated")) for datum in chart.spec["datasets"]["rows"]]
        assert any(is_simulated) == ("Marks with dashed outlines" in chart.alt_text) == bool(caption)
        assert caption == ("Simulated, not measured" if all(is_simulated) else caption)
        marks = [layer for layer in layers(chart.spec) if layer["mark"]["type"] in ("bar", "point")]
        assert all(("strokeDash" in layer["encoding"]) == any(is_simulated) for layer in marks)


def section_of(title: str, *records: Record) -> Section:
    """Return the first section of the records' report whose title begins so."""
    report = sections(View("demo", list(records)))
    return next(entry for entry in report if entry.title.startswith(title))


def tables(section: Section) -> list[Table]:
    return [part for part in section.parts if isinstance(part, Table)]


def test_three_sources_stand_side_by_side_in_their_units() -> None:
    """The measurement beside a simulation is that of the same configuration on the same kind and number of nodes."""
    simulation = {"peak_allocated_bytes": 20 * MIB, "peak_reserved_bytes": 24 * MIB, "step_seconds": 0.12}
    measurement = {"peak_allocated_bytes": 21 * MIB, "step_seconds": 0.11, "noise_warning": "busy"}
    first, second, third = (
        {"cluster": {"nodes": n}, "model": {"hidden_size": size}} for n, size in ((1, 128), (2, 128), (1, 64))
    )
    simulated = on_h100(1, config=first, **simulation)
    other = on_h100(3, "processes", third, peak_allocated_bytes=MIB, seq_len=64)
    memory, time = tables(section_of("Formula", simulated, on_h100(2, "processes", first, **measurement), other))
    assert [[*cells[1:]] for cells in memory.rows] == [["19.00", "20.00", "+5.3", "24.00", "21.00", "-4.8"]]
    assert [title.split()[-1] for title in memory.header[1:]] == ["MiB", "MiB", "%", "MiB", "MiB", "%"]
    assert [[*cells[1:]] for cells in time.rows] == [["100.0", "80.0–130.0", "120.0", "+20.0", "110.0"]]
    assert isinstance(time.rows[0][-1], Disturbed)
    elsewhere = section_of("Formula", simulated, on_h100(2, "processes", second, **measurement))
    assert not any("measured" in name for table in tables(elsewhere) for name in table.header)


PROFILED = [
    {"role": "temporary", "what": f"aten::{name}", "bytes": size * MIB}
    for name, size in zip("abcde", (3, 9, 1, 5, 2), strict=True)
]


def test_the_peak_outside_the_interval_is_explained_by_its_largest_parts() -> None:
    entry = on_cpu(1, "simulated", peak_rank=0, peak_phase="backward")
    profile = {"profiled": {"at_peak": {"phase": "backward", "bytes": 20 * MIB, "parts": PROFILED}}}
    text = page_text([dataclasses.replace(entry, rank_entries=[entry.rank_entries[0] | profile])])
    assert "the simulated peak is 1.053 of the formula's, outside its interval of 0.979 to 1.032" in text
    assert re.findall(r"aten::(\w) ([\d.]+) MiB", text) == [("b", "9.00"), ("d", "5.00"), ("a", "3.00"), ("e", "2.00")]


def test_simulations_are_no_measurements_of_predicted_peaks() -> None:
    """A virtual run has no step either: its parts are computing alone, so that no chart adds them up to a step."""
    entries = (on_cpu(1, "simulated", peak_allocated_bytes=40 * MIB), on_cpu(2, "processes"))
    virtual = on_h100(1, "virtual", step_seconds=None, tokens_per_second=None, forward_seconds=0.5)
    predicted = section_of("Predicted and measured", *entries)
    steps = section_of("Breakdown of step time", virtual, on_h100(2, forward_seconds=0.05))
    charts = [part for section in (predicted, steps) for part in section.parts if isinstance(part, Chart)]
    assert [len(part.rows) for part in (*tables(predicted), *(chart.table for chart in charts))] == [1, 1, 1]
    assert "of 1 configuration" in charts[0].alt_text and "-5.00" in charts[0].alt_text
    assert "A virtual run has no step time" in str(steps.parts)


def test_a_pipeline_of_which_a_stage_was_not_simulated_has_no_claims() -> None:
    """The last stage has one micro-batch in flight, and the first, which the papers' figure is of, has two."""
    degrees = {"pp": 2, "schedule": "1f1b", "virtual_stages": 1, "grad_accumulation": 8, "world_size": 2}
    unknown = dict.fromkeys(("loss_deviation", "grad_deviation", "update_deviation", "proven_steps", "loss_first"))
    whole = record_of(
        row(1, "pp_1f1b", "torch", 0, launch="simulated", max_in_flight_micro_batches=2, **degrees | unknown)
    )
    part = dataclasses.replace(whole, rank_entries=whole.rank_entries[1:])
    assert [claim.measured for claim in claims(View("demo", [whole]).lines) if "in flight" in claim.claim] == [2]
    assert not claims(View("demo", [part.with_row(max_in_flight_micro_batches=1)]).lines)


PARTS: dict[str, Any] = {"forward_seconds": 0.05, "backward_seconds": 0.03, "idle_seconds": 0.01, "model_flops": 1e12}

CPUS = [on_cpu(number, "processes", micro_batch=number) for number in (1, 2)]


@pytest.mark.parametrize(
    ("entries", "present", "absent"),
    [
        ([on_h100(1)], "interval of the formula", "beside a measurement"),
        ([on_cpu(1, "simulated")], "Formula", "interval of the formula"),
        (
            [on_h100(1, **PARTS, pp=2)],
            "by a model of the device|A simulation counts",
            "two traced steps|its waiting for other stages, is idle time",
        ),
        (
            [on_h100(1, "processes", **PARTS, pp=2)],
            "two traced steps|its waiting for other stages, is idle time",
            "A simulation counts|by a model of the device",
        ),
        # Simulations on a CPU have no speed and are in no group, but stand in the same tables.
        ([*CPUS, on_cpu(3, "simulated")], "**Speed launched as processes**", ""),
        (CPUS, "**Speed**", "**Speed launched"),
        (
            [
                on_h100(1, **PARTS, step_seconds=0.09, tokens_per_second=2e4),
                on_h100(
                    2, **PARTS | {"backward_seconds": 0.11}, step_seconds=0.17, tokens_per_second=1e4, micro_batch=1
                ),
            ],
            "A step of ddp micro-batch 1 takes 80 ms longer than one of ddp micro-batch 4 by the model, mainly by",
            "in the median run of each",
        ),
        ([on_h100(1), on_h100(2, communication_bytes=1000, micro_batch=1)], "<0.01 × its bytes sent", ""),
    ],
)
def test_what_is_said_of_sources_is_said_where_it_holds(entries: list[Record], present: str, absent: str) -> None:
    text = page_text(entries)
    assert [words for words in present.split("|") if words not in text] == []
    assert [words for words in absent.split("|") if words and words in text] == []
