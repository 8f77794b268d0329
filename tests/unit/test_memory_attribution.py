"""The owner of every block at the peak, and a recorded trace divided as Holistic Trace Analysis divides it."""

import functools
import gzip
import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda._memory_viz import trace

from harness.measure import memory_attribution, memory_snapshot
from harness.measure.allocation_log import AllocationLog, OpSpan, StepAnnotations
from harness.measure.memory_attribution import attribute_peak, peak_without_backend
from harness.measure.time_breakdown import TraceEvent, gpu_time_breakdown, trace_problem
from harness.records.rank_report import MEMORY_ROLES, AtPeak

Line = tuple[int, int]  # address, bytes; negative: freed


def log_of(lines: list[Line], standing: int = 0, foreign: frozenset[int] = frozenset()) -> AllocationLog:
    addresses, sizes = np.array(lines, np.int64).reshape(-1, 2).T
    is_foreign = np.array([at in foreign for at in range(len(lines))], np.int64)
    return AllocationLog(np.arange(len(lines)), addresses, sizes, is_foreign, standing)


def peak_of(log: AllocationLog, annotations: StepAnnotations, example: AllocationLog | None = None) -> AtPeak:
    peak = attribute_peak(log, annotations, example or log)
    assert peak is not None
    return peak


def parts(peak: AtPeak) -> dict[tuple[str, str], int]:
    return {(part.role, part.what): part.bytes for part in peak.parts}


# A parameter of 100 and a bucket of 70 stand; an activation of 40 comes, a gradient of 30, a temporary of 8.
STEP: list[Line] = [(1, 100), (2, 70), (3, 40), (4, 30), (5, 8), (5, -8), (3, -40), (4, -30)]


def example_annotations() -> StepAnnotations:
    annotations = StepAnnotations()
    annotations.claim(2, [1], "parameter", "at rest")
    annotations.claim(3, [3], "activation", "held")
    annotations.claim(7, [3], "activation", "held", is_owned=False)
    annotations.claim(6, [4], "gradient", "gradients")  # seen after the peak
    annotations.claim(6, [2], "communication", "bucket")
    annotations.claim(7, [2], "gradient", "gradients")  # what the bucket holds for a while
    annotations.operators = [OpSpan(2, 3, "aten::mm"), OpSpan(4, 6, "aten::add")]
    annotations.phases = [OpSpan(2, 4, "forward"), OpSpan(4, 8, "backward")]
    return annotations


EXAMPLE = log_of(STEP, standing=2)

ROLES = {
    ("parameter", "at rest"): 100,
    ("gradient", "gradients"): 30,
    ("activation", "held"): 40,
    ("communication", "bucket"): 70,
    ("temporary", "aten::add"): 8,
}


def test_every_block_has_the_role_of_its_claim() -> None:
    peak = peak_of(EXAMPLE, example_annotations())
    assert (peak.phase, peak.bytes, parts(peak)) == ("backward", 248, ROLES)


def test_the_latest_claim_before_the_peak_decides_the_role() -> None:
    """An activation freed before the peak is one no longer, and a bucket is a gradient while it holds one."""
    annotations = example_annotations()
    annotations.claim(4, [3], "activation", "held", is_owned=False)
    annotations.claim(3, [2], "gradient", "gradients")
    peak = parts(peak_of(EXAMPLE, annotations))
    assert peak["temporary", "allocated in forward"] == 40
    assert peak["gradient", "gradients"] == 100 and ("communication", "bucket") not in peak
    annotations.claim(4, [2], "gradient", "gradients", is_owned=False)
    assert parts(peak_of(EXAMPLE, annotations))["gradient", "gradients"] == 30


def test_a_claim_ends_when_its_block_is_freed() -> None:
    annotations = StepAnnotations()
    annotations.claim(1, [1], "gradient", "gradients")
    peak = peak_of(log_of([(1, 10), (1, -10), (1, 20)]), annotations)
    assert parts(peak) == {("temporary", memory_attribution.BETWEEN): 20}


def test_allocations_during_pauses_are_no_peak() -> None:
    annotations, log = example_annotations(), log_of([*STEP[:5], (9, 1000), (9, -1000), *STEP[5:]], standing=2)
    assert peak_of(log, annotations).bytes == 1248
    annotations.pauses = [OpSpan(5, 7, "measuring")]
    assert peak_of(log, annotations).bytes == 248


# The same step with other addresses, a copy of 500 by a backend's thread, and temporaries that are freed late.
OTHER: list[Line] = [(1, 100), (22, 70), (31, 40), (77, 500), (41, 30), (51, 8), (31, -40), (51, -8)]

UNLIKE = log_of([*OTHER[:2], (31, 41), *OTHER[3:], (41, -30), (77, -500)], standing=2)


def test_roles_of_another_step_follow_from_an_annotated_example() -> None:
    other = log_of([*OTHER, (41, -30), (77, -500)], standing=2, foreign=frozenset({3}))
    assert parts(peak_of(other, example_annotations(), EXAMPLE)) == ROLES | {
        ("communication", memory_attribution.BACKEND): 500
    }
    assert attribute_peak(UNLIKE, example_annotations(), EXAMPLE) is None


def test_copies_of_the_communication_backend_are_no_part_of_the_peak_without_them() -> None:
    """A copy belongs to a backend's thread or to an operator that hands tensors over; its address may be used anew."""
    other = log_of([*OTHER, (77, -500), (77, 9)], standing=2, foreign=frozenset({3}))
    annotations = example_annotations()
    assert peak_without_backend(other, annotations, log_of([*STEP, (9, 9)], standing=2)) == 248
    annotations.operators = [OpSpan(4, 6, "c10d::_reduce_scatter_base_")]
    for log in (EXAMPLE, EXAMPLE._replace()):
        assert peak_without_backend(log, annotations, EXAMPLE) == 240
    annotations.operators = [OpSpan(4, 6, "_c10d_functional::all_gather_into_tensor")]  # its result is the layout's
    assert peak_without_backend(EXAMPLE, annotations, EXAMPLE) == 248
    assert peak_without_backend(UNLIKE, annotations, EXAMPLE) is None


def test_blocks_that_only_the_example_allocates_are_skipped() -> None:
    example = log_of([*STEP[:3], (8, 3), (8, -3), *STEP[3:]], standing=2)
    annotations = StepAnnotations()
    annotations.claim(6, [4], "gradient", "gradients")
    assert parts(peak_of(EXAMPLE, annotations, example))["gradient", "gradients"] == 30


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Line], int]:
    """Generate blocks that come and go, with the permanent ones first."""
    live: dict[int, int] = {}
    lines: list[Line] = []
    standing = draw(st.integers(0, 5))
    for number in range(draw(st.integers(1, 40))):
        if number >= standing and live and draw(st.booleans()):
            address = draw(st.sampled_from(sorted(live)))
            lines.append((address, -live.pop(address)))
        else:
            address = next(a for a in range(1, 60) if a not in live)
            live[address] = draw(st.integers(1, 1000))
            lines.append((address, live[address]))
    return lines, min(standing, len(lines))


@settings(deadline=None)
@given(histories(), st.data())
def test_parts_add_up_to_the_peak(history: tuple[list[Line], int], data: st.DataObject) -> None:
    """For any claims in any order and phase, nothing is counted twice and nothing is left out."""
    lines, standing = history
    annotations = StepAnnotations()
    for _ in range(data.draw(st.integers(0, 20))):
        role = data.draw(st.sampled_from(MEMORY_ROLES[:-1]))
        moment = data.draw(st.integers(standing, len(lines)))  # what stands was there before anybody claims
        address = data.draw(st.integers(1, 30))
        annotations.claim(moment, [address], role, "x", is_owned=data.draw(st.booleans()))
    log = log_of(lines, standing)
    totals = list(itertools.accumulate(size for _, size in lines))
    peak = peak_of(log, annotations)
    assert peak.bytes == max(totals[max(0, standing - 1) :]) == sum(part.bytes for part in peak.parts)
    twin = attribute_peak(log._replace(), annotations, log)
    assert twin is None or parts(twin) == parts(peak)


def test_torchs_viewer_reads_the_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "rank.pickle"
    memory_snapshot.write_snapshot(path, memory_snapshot.snapshot_of_host(EXAMPLE, example_annotations()))
    read: dict[str, Any] = pickle.loads(path.read_bytes())
    entries = read["device_traces"][0]
    assert [entry["action"] for entry in entries].count("alloc") == 5
    named = {entry["addr"]: [frame["name"] for frame in entry["frames"]] for entry in entries if entry["frames"]}
    assert named[4] == ["gradient", "gradients", "no operator", "forward"]
    assert named[5][-2:] == ["aten::add", "backward"]
    assert "del" in trace(read)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_log_attributes_blocks_of_its_allocator() -> None:
    from harness.measure.memory import DeviceMemory

    memory = DeviceMemory(torch.device("cuda", 0))
    first = torch.empty(1 << 20, device="cuda")
    history = memory.begin_log()
    other = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    annotations = StepAnnotations()
    annotations.claim(history.position(), [first.untyped_storage().data_ptr()], "parameter", "first")
    annotations.claim(history.position(), [other.untyped_storage().data_ptr()], "gradient", "other")
    del other
    log = history.end()
    assert log is not None
    sums = {part.role: part.bytes for part in peak_of(log, annotations).parts}
    assert sums["parameter"] == 4 << 20 and sums["gradient"] == 3 << 20


# What Holistic Trace Analysis finds in the trace: the time from the first kernel to the end of the last, the time of
# communication kernels, and the share of it that computation kernels overlap (get_comm_comp_overlap, in nanoseconds).
WINDOW_SECONDS, COMMUNICATION_SECONDS, OVERLAP = 0.66055, 0.04688, 0.156

PHASES = {"## forward ##": "forward", "## backward ##": "backward", "## optimizer ##": "optimizer"}


@functools.cache
def recorded_events() -> tuple[TraceEvent, ...]:
    """Return the trace's entries as torch's profiler lists them: an operator's number is not that of a CUDA call."""
    with gzip.open(Path(__file__).parents[1] / "data" / "holistic_trace_analysis" / "nccl_data.json.gz") as file:
        entries = json.load(file)["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X" and entry["cat"] != "Trace"]
    events = []
    for span in spans:
        start, ids = round(1000 * span["ts"]), span["args"]
        number = ids["correlation"] if "correlation" in ids else ids["External id"]
        end = start + round(1000 * span["dur"])
        events.append(TraceEvent(span["name"], start, end, span["cat"], span["tid"], number))
    return tuple(events)


def mark(event: TraceEvent) -> TraceEvent:
    """Return an annotation of the trace under the name that the harness would have given it."""
    name = "step" if event.name.startswith("ProfilerStep") else PHASES.get(event.name, "")
    return event._replace(name=f"harness.{name}") if name and event.activity == "user_annotation" else event


def test_the_whole_trace_is_divided_as_holistic_trace_analysis_divides_it() -> None:
    events = list(recorded_events())
    start, end = min(event.start for event in events), max(event.end for event in events)
    whole = gpu_time_breakdown([*events, TraceEvent("harness.step", start, end, "user_annotation")])
    share = whole.phases["rest"]
    communication = share.exposed_seconds + whole.overlapped_seconds
    assert whole.seconds == pytest.approx(WINDOW_SECONDS, abs=1e-5)
    assert communication == pytest.approx(COMMUNICATION_SECONDS, abs=1e-5)
    assert whole.overlapped_seconds / communication == pytest.approx(OVERLAP, abs=5e-4)
    # 960 copies in the trace run where nothing else does for a third of a percent of it.
    assert 0.002 < share.copy_seconds < 0.003


def test_the_phases_of_the_recorded_steps_add_up() -> None:
    breakdown = gpu_time_breakdown([mark(event) for event in recorded_events()])
    assert set(breakdown.phases) == {"forward", "backward", "optimizer", "rest"}
    assert sum(share.seconds for share in breakdown.phases.values()) == pytest.approx(breakdown.seconds)
    assert breakdown.phases["backward"].exposed_seconds > 0.99 * (COMMUNICATION_SECONDS - breakdown.overlapped_seconds)
    for share in breakdown.phases.values():
        assert 0 <= share.exposed_seconds + share.waiting_seconds + share.copy_seconds <= share.seconds


def test_a_real_trace_that_lost_kernels_of_a_step_is_noticed() -> None:
    """On a GPU every launch has its kernel; the profiler may drop those of a step from some moment on."""
    events = [mark(event) for event in recorded_events()]
    assert trace_problem(events) == ""
    _, second, *_ = sorted(event for event in events if event.name == "harness.step")
    calls = [event for event in events if event.activity == "cuda_runtime" and second.start <= event.start < second.end]
    lost = {event.correlation_id for event in calls[len(calls) // 10 :]}
    left = [event for event in events if event.activity != "kernel" or event.correlation_id not in lost]
    assert re.fullmatch(r"torch's profiler recorded 1,\d+ of the 2,\d+ kernels that were launched", trace_problem(left))


@pytest.mark.parametrize("offset", [0, 1000, 5000])
def test_numbers_of_operators_are_not_those_of_cuda_calls(offset: int) -> None:
    """An operator may have the number of a CUDA call that another operator made: the two are counted separately."""
    events = [mark(event) for event in recorded_events()]
    calls = sorted(event.correlation_id for event in events if event.activity == "cuda_runtime")
    operators = sorted({event.correlation_id for event in events if event.activity == "cpu_op"})
    renumbered = {number: calls[(index + offset) % len(calls)] for index, number in enumerate(operators)}
    collided = [
        event._replace(correlation_id=renumbered[event.correlation_id]) if event.activity == "cpu_op" else event
        for event in events
    ]
    collided.sort(key=lambda event: event.activity == "cpu_op")  # the profiler promises no order; the last would count
    assert gpu_time_breakdown(collided) == gpu_time_breakdown(events)
