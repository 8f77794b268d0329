"""A trace recorded on two GPUs, divided as Holistic Trace Analysis divides it."""

import functools
import gzip
import json
from pathlib import Path

import pytest

from harness.measure.time_breakdown import TraceEvent, gpu_time_breakdown
from harness.records.rank_report import TimeBreakdown

TRACE = Path(__file__).parents[1] / "data" / "holistic_trace_analysis" / "nccl_data.json.gz"

# What Holistic Trace Analysis finds in the trace: the time from the first kernel to the end of the last, the time of
# communication kernels, and the share of it that computation kernels overlap (get_comm_comp_overlap, in nanoseconds).
WINDOW_SECONDS, COMMUNICATION_SECONDS, OVERLAP = 0.66055, 0.04688, 0.156

PHASES = {"## forward ##": "forward", "## backward ##": "backward", "## optimizer ##": "optimizer"}


@functools.cache
def recorded_events() -> tuple[TraceEvent, ...]:
    """Return the trace's entries as torch's profiler lists them: an operator's number is not that of a CUDA call."""
    with gzip.open(TRACE) as file:
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


def breakdown_of(events: list[TraceEvent]) -> TimeBreakdown:
    breakdown = gpu_time_breakdown(events)
    assert breakdown is not None
    return breakdown


def test_the_whole_trace_is_divided_as_holistic_trace_analysis_divides_it() -> None:
    events = list(recorded_events())
    start, end = min(event.start for event in events), max(event.end for event in events)
    whole = breakdown_of([*events, TraceEvent("harness.step", start, end, "user_annotation")])
    share = whole.phases["rest"]
    communication = share.exposed_seconds + whole.overlapped_seconds
    assert whole.seconds == pytest.approx(WINDOW_SECONDS, abs=1e-5)
    assert communication == pytest.approx(COMMUNICATION_SECONDS, abs=1e-5)
    assert whole.overlapped_seconds / communication == pytest.approx(OVERLAP, abs=5e-4)
    # 960 copies in the trace run where nothing else does for a third of a percent of it.
    assert 0.002 < share.copy_seconds < 0.003


def test_the_phases_of_the_recorded_steps_add_up() -> None:
    breakdown = breakdown_of([mark(event) for event in recorded_events()])
    assert set(breakdown.phases) == {"forward", "backward", "optimizer", "rest"}
    assert sum(share.seconds for share in breakdown.phases.values()) == pytest.approx(breakdown.seconds)
    assert breakdown.phases["backward"].exposed_seconds > 0.99 * (COMMUNICATION_SECONDS - breakdown.overlapped_seconds)
    for share in breakdown.phases.values():
        assert 0 <= share.exposed_seconds + share.waiting_seconds + share.copy_seconds <= share.seconds


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
    assert breakdown_of(collided) == breakdown_of(events)
