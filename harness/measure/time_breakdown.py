"""The division of a step's time into computing, communicating and waiting, by torch's profiler.

Communication is exposed while a collective is in flight and no operator computes, and overlapped while one does, as
Holistic Trace Analysis defines it. On a GPU both are kernels in their streams; on a CPU they are operators of the
rank's thread and collectives of gloo's threads. Messages between pipeline stages are separate: they are in flight from
their request until the other stage is ready for them.

A kernel belongs to the phase in which any thread launched it. The profiler's own spans on the GPU are not used, because
they include only kernels of the thread that opened them, and backward runs in another thread.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.measure.intervals import Intervals, difference, intersection, merged_intervals, total_seconds
from harness.probe import Listener
from harness.records.rank_report import OUTSIDE_PHASES, PhaseShare, TimeBreakdown

STEP_PHASE = "step"

_PREFIX = "harness."  # the prefix of phases' names in the profiler's list

_COMMUNICATION = ("gloo:", "nccl", "c10d::", "_c10d_functional::", "deepspeed::")

_MESSAGES = ("gloo:send", "gloo:recv", "c10d::send", "c10d::recv", "ncclDevKernel_SendRecv")

_COMPUTATION = ("aten::", "fsdp::")  # operators; autograd nodes, phases and wrappers only contain them


class TraceEvent(NamedTuple):
    """One entry of the profiler's list. Times are in nanoseconds."""

    name: str
    start: int
    end: int
    on_gpu: bool = False
    thread: int = 0
    correlation_id: int = 0  # the id of an entry on the CPU
    launched_by: int = 0  # the correlation id of the operator that launched an entry on the GPU
    is_annotation: bool = False  # whether record_function made the entry, called by the harness or by other code


class StepTrace(Listener):
    """A listener that profiles steps; breakdown() divides their time afterwards."""

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=activities)

    def __enter__(self) -> "StepTrace":
        self.profiler.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        self.profiler.__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase in the profiler's list."""
        with record_function(_PREFIX + name):
            yield

    def breakdown(self) -> TimeBreakdown | None:
        """Return the breakdown, or None if the profiler recorded nothing on the GPU, for example without permission."""
        assert self.profiler.profiler is not None and self.profiler.profiler.kineto_results is not None
        events = [
            TraceEvent(
                event.name(),
                event.start_ns(),
                event.start_ns() + event.duration_ns(),
                event.device_type() != torch.profiler.DeviceType.CPU,
                event.start_thread_id(),
                event.correlation_id(),
                event.linked_correlation_id(),
                event.is_user_annotation(),
            )
            for event in self.profiler.profiler.kineto_results.events()
        ]
        return gpu_time_breakdown(events) if self.on_gpu else cpu_time_breakdown(events)


def cpu_time_breakdown(events: Sequence[TraceEvent]) -> TimeBreakdown:
    """Divide the time of traced steps by the operators of the threads that marked them; no waiting is counted."""
    marks = [event for event in events if event.name.startswith(_PREFIX)]
    threads = {mark.thread for mark in marks}
    own = [event for event in events if event.thread in threads]
    operators = _spans(event for event in own if event.name.startswith(_COMPUTATION))
    computing = difference(operators, _spans(event for event in own if event.name.startswith(_COMMUNICATION)))
    messages = difference(_spans(event for event in events if event.name.startswith(_MESSAGES)), computing)
    return _divide(_occurrences(marks), computing, _collectives(events), messages)


def gpu_time_breakdown(events: Sequence[TraceEvent]) -> TimeBreakdown | None:
    """Divide traced steps by kernels. A phase lasts from its first kernel to its last, or to the next phase's first."""
    marks = [event for event in events if event.name.startswith(_PREFIX) and not event.on_gpu]
    kernels = [event for event in events if event.on_gpu and not event.is_annotation]
    computing = [event for event in kernels if not event.name.startswith(_COMMUNICATION)]
    launched_at = {event.correlation_id: event.start for event in events if not event.on_gpu}
    moments = np.array([launched_at.get(kernel.launched_by, 0) for kernel in computing], np.int64)
    times = np.array([(kernel.start, kernel.end) for kernel in computing], np.int64).reshape(-1, 2)
    phase_marks = []
    for mark in marks:
        within = times[(moments >= mark.start) & (moments < mark.end)]
        if len(within):
            phase_marks.append(mark._replace(start=int(within[:, 0].min()), end=int(within[:, 1].max())))
    if not phase_marks:
        return None
    phases = _occurrences(phase_marks)
    starts = sorted(start for name, pairs in phases.items() if name != STEP_PHASE for start, _ in pairs)
    for name, pairs in phases.items():
        if name != STEP_PHASE:
            indexed = ((start, end, bisect_right(starts, start)) for start, end in pairs)
            phases[name] = [(start, min([end, *starts[after : after + 1]])) for start, end, after in indexed]
    busy = merged_intervals((int(a), int(b)) for a, b in times)
    collectives = _collectives(kernels)
    whole = merged_intervals(phases[STEP_PHASE])
    return _divide(phases, busy, collectives, difference(difference(whole, busy), collectives))


def _divide(
    phases: Mapping[str, Sequence[tuple[int, int]]], computing: Intervals, collectives: Intervals, waiting: Intervals
) -> TimeBreakdown:
    exposed, whole = difference(collectives, computing), merged_intervals(phases[STEP_PHASE])
    parts = {name: intersection(merged_intervals(pairs), whole) for name, pairs in phases.items() if name != STEP_PHASE}
    parts[OUTSIDE_PHASES] = difference(
        whole, merged_intervals((int(a), int(b)) for part in parts.values() for a, b in part)
    )
    shares = {
        name: PhaseShare(
            total_seconds(part),
            total_seconds(intersection(exposed, part)),
            total_seconds(difference(intersection(waiting, part), exposed)),
        )
        for name, part in parts.items()
    }
    return TimeBreakdown(
        total_seconds(whole), shares, total_seconds(intersection(intersection(collectives, computing), whole))
    )


def _occurrences(marks: Iterable[TraceEvent]) -> dict[str, list[tuple[int, int]]]:
    """Return the start and end of every occurrence of each phase."""
    occurrences: dict[str, list[tuple[int, int]]] = {}
    for mark in marks:
        occurrences.setdefault(mark.name.removeprefix(_PREFIX), []).append((mark.start, mark.end))
    return occurrences


def _collectives(events: Iterable[TraceEvent]) -> Intervals:
    return _spans(e for e in events if e.name.startswith(_COMMUNICATION) and not e.name.startswith(_MESSAGES))


def _spans(events: Iterable[TraceEvent]) -> Intervals:
    return merged_intervals((event.start, event.end) for event in events)
