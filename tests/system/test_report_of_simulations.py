"""The report of simulated rows: their figures beside others, and no sentence that holds of measured rows alone."""

import dataclasses
import re
from typing import Any

from harness.records.schema import Record
from harness.report import markdown
from harness.report.claims import claims
from harness.report.document import BulletList, Chart, Disturbed, Paragraph, Section, Table
from harness.report.sections import sections
from harness.report.view import View
from harness.util.files import JsonObject
from tests.support.example_records import MIB, record_of, row

H100 = "NVIDIA H100 80GB HBM3"

STEP: JsonObject = {
    "step_seconds": 0.1,
    "low_seconds": 0.08,
    "high_seconds": 0.13,
    "forward_seconds": 0.03,
    "backward_seconds": 0.06,
    "optimizer_seconds": 0.01,
    "other_seconds": 0.0,
    "bubble_seconds": 0.0,
    "copy_seconds": 0.0,
    "exposed_seconds": {},
}


def simulated(number: int, strategy: str, **changes: Any) -> Record:
    """Return the record of a simulated row; `step_seconds` is None on a CPU."""
    unknown = dict.fromkeys(("loss_deviation", "grad_deviation", "update_deviation", "proven_steps", "loss_first"))
    cells = row(number, strategy, "torch", 0, launch="simulated", **(unknown | changes))
    return record_of(cells)


def on_cpu(number: int, launch: str, **changes: Any) -> Record:
    """Return a DDP record of this launch on a CPU, of one configuration."""
    times = dict.fromkeys(("step_seconds", "tokens_per_second", "tokens_per_second_per_device"))
    more = {"predicted_peak_bytes": 19 * MIB} | (times if launch == "simulated" else {}) | changes
    return record_of(row(number, "ddp", "torch", 0, launch=launch, **more))


def on_h100(number: int, launch: str = "simulated", **changes: Any) -> Record:
    """Return a DDP record on H100 with a planned step."""
    cells = {"measured_on": H100, "predicted_step_seconds": 0.1, "predicted_peak_bytes": 19 * MIB} | changes
    return dataclasses.replace(record_of(row(number, "ddp", "torch", 0, launch=launch, **cells)), predicted_step=STEP)


def report(*records: Record) -> list[Section]:
    return sections(View("demo", list(records)))


def part_of(found: list[Section], title: str) -> Section:
    return next(entry for entry in found if entry.title.startswith(title))


def lines_of(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.header, cells, strict=True)) for cells in table.rows]


def text_of(section: Section) -> str:
    return " ".join(part.text for part in section.parts if isinstance(part, Paragraph))


def test_three_sources_stand_side_by_side_in_their_units() -> None:
    """The measurement beside a simulation is that of the same configuration on the same kind and number of nodes."""
    peaks = (20 * MIB, 21 * MIB, 24 * MIB)
    entries = [
        on_h100(1, peak_allocated_bytes=peaks[0], peak_reserved_bytes=peaks[2], step_seconds=0.12),
        on_h100(2, "processes", peak_allocated_bytes=peaks[1], step_seconds=0.11, noise_warning="busy"),
        on_h100(3, "processes", peak_allocated_bytes=MIB, seq_len=64),
    ]
    configs = [{"cluster": {"nodes": 1}, "model": {"hidden_size": length}} for length in (128, 128, 64)]
    records = [dataclasses.replace(entry, config=config) for entry, config in zip(entries, configs, strict=True)]  # type: ignore[arg-type]
    section = part_of(report(*records), "Formula")
    memory, time = (part for part in section.parts if isinstance(part, Table))
    assert [[*cells[1:]] for cells in memory.rows] == [["19.00", "20.00", "+5.3", "24.00", "21.00", "-4.8"]]
    assert [title.split()[-1] for title in memory.header[1:]] == ["MiB", "MiB", "%", "MiB", "MiB", "%"]
    assert [[*cells[1:]] for cells in time.rows] == [["100.0", "80.0–130.0", "120.0", "+20.0", "110.0"]]
    assert isinstance(time.rows[0][-1], Disturbed)  # as something disturbed that run
    elsewhere = dataclasses.replace(records[1], config=configs[1] | {"cluster": {"nodes": 2}})  # type: ignore[arg-type]
    section = part_of(report(records[0], elsewhere), "Formula")
    assert not any("measured" in name for part in section.parts if isinstance(part, Table) for name in part.header)


def test_what_is_said_of_sources_is_said_where_it_holds() -> None:
    gpu, cpu = (text_of(part_of(report(entry), "Formula")) for entry in (on_h100(1), on_cpu(1, "simulated")))
    assert "workspaces of matrix products" in gpu and "interval" in gpu
    assert "workspaces" not in cpu and "interval" not in cpu and "measurement" not in cpu + gpu


def test_the_peak_outside_the_interval_is_explained_by_its_largest_parts() -> None:
    parts = [
        {"role": "temporary", "what": f"aten::{name}", "bytes": size * MIB}
        for name, size in zip("abcde", (3, 9, 1, 5, 2), strict=True)
    ]
    profiled = {"profiled": {"at_peak": {"phase": "backward", "bytes": 20 * MIB, "parts": parts}}}
    entry = on_cpu(1, "simulated", peak_rank=0, peak_phase="backward")
    entry = dataclasses.replace(entry, rank_entries=[entry.rank_entries[0] | profiled])
    (items,) = (part for part in part_of(report(entry), "Formula").parts if isinstance(part, BulletList))
    text = dict(items.items)["ddp"]
    assert text.startswith("the simulated peak is 1.053 of the formula's, outside its interval of 0.97 to 1.032")
    assert re.findall(r"aten::(\w) ([\d.]+) MiB", text) == [("b", "9.00"), ("d", "5.00"), ("a", "3.00"), ("e", "2.00")]


def test_simulations_are_no_measurements_of_predicted_peaks() -> None:
    found = report(on_cpu(1, "simulated", peak_allocated_bytes=40 * MIB), on_cpu(2, "processes"))
    section = part_of(found, "Predicted and measured")
    (chart,) = (part for part in section.parts if isinstance(part, Chart))
    (table,) = (part for part in section.parts if isinstance(part, Table))
    assert len(chart.table.rows) == len(table.rows) == 1
    assert "of 1 configuration" in chart.alt_text and "-5.00" in chart.alt_text


def test_a_pipeline_of_which_a_stage_was_not_simulated_has_no_claims() -> None:
    """The last stage has one micro-batch in flight, and the first, which the papers' figure is of, has two."""
    degrees = {"pp": 2, "schedule": "1f1b", "virtual_stages": 1, "grad_accumulation": 8, "world_size": 2}
    whole = simulated(1, "pp_1f1b", max_in_flight_micro_batches=2, **degrees)
    part = dataclasses.replace(whole, rank_entries=whole.rank_entries[1:])
    assert [claim.measured for claim in claims(View("demo", [whole]).lines) if "in flight" in claim.claim] == [2]
    assert not claims(View("demo", [part.with_row(max_in_flight_micro_batches=1)]).lines)


def test_the_texts_on_time_and_operations_are_those_of_the_rows() -> None:
    parts: dict[str, Any] = {
        "forward_seconds": 0.05,
        "backward_seconds": 0.03,
        "idle_seconds": 0.01,
        "model_flops": 1e12,
        "pp": 2,
    }
    figures = ("Breakdown of step time", "Floating-point operations")
    own, other = (
        [text_of(part_of(report(entry), title)) for title in figures]
        for entry in (on_h100(1, **parts), on_h100(1, "processes", **parts))
    )
    assert "profiler" not in own[0] and "by a model of the device" in own[0]
    assert "two traced steps" in other[0] and "model of the device" not in other[0]
    assert "its waiting for other stages, is idle time" in other[0] and "its waiting" not in own[0]
    assert "A simulation counts" in own[1] and "A simulation counts" not in other[1]


def test_a_virtual_row_has_no_step_time() -> None:
    """Its parts are computing alone, so that no chart adds them up to a step."""
    virtual = on_h100(1, "virtual", step_seconds=None, tokens_per_second=None, forward_seconds=0.5)
    section = part_of(report(virtual, on_h100(2, forward_seconds=0.05)), "Breakdown of step time")
    charts = [part for part in section.parts if isinstance(part, Chart)]
    assert [len(chart.table.rows) for chart in charts] == [1]
    assert "A virtual run has no step time" in text_of(section)


def test_answers_say_that_they_are_of_the_measured_rows() -> None:
    """Simulations on a CPU have no speed and are in no group, but stand in the same tables."""
    measured = [on_cpu(number, "processes", micro_batch=number) for number in (1, 2)]
    texts = markdown.page("demo", report(*measured, on_cpu(3, "simulated")))
    assert "**Speed launched as processes**" in texts
    assert "launched as" not in markdown.page("demo", report(*measured)).replace("ranks launched as", "")


def test_a_small_ratio_of_bytes_is_not_zero() -> None:
    entries = [on_h100(1), on_h100(2, communication_bytes=1000, micro_batch=1)]
    assert "<0.01 × its bytes sent" in markdown.page("demo", report(*entries)).replace("&lt;", "<")
