"""Where a step's time goes between computing and communicating, from torch's own profiler.

Communication is exposed while a collective is in flight and no operator computes, overlapped while one does: the
measure of Holistic Trace Analysis. On a GPU both are kernels in their streams; on a CPU operators of the rank's thread
and the collectives of gloo's threads. Messages between pipeline stages are told apart: they are in flight from the
moment they are asked for until the other stage comes to them.

A kernel belongs to the phase in which it was asked for, by whichever thread. The profiler's own spans on the GPU are
left aside: they know the kernels of the thread alone that opened them, and backward has another.
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
from harness.records.schema import OUTSIDE_PHASES

STEP_PHASE = "step"

_MARK = "harness."  # before the names of phases, in the profiler's list

_SENDS = ("gloo:", "nccl", "c10d::", "_c10d_functional::", "deepspeed::")

_MESSAGES = ("gloo:send", "gloo:recv", "c10d::send", "c10d::recv", "ncclDevKernel_SendRecv")

_COMPUTES = ("aten::", "fsdp::")  # operators; an autograd node, a phase or a wrapper only contains them


class PhaseShare(NamedTuple):
    """Of one phase of a step: how long it took, and how long it communicated or waited without computing."""

    seconds: float
    exposed_seconds: float
    waiting_seconds: float  # on a CPU for messages, on a GPU for any work


class TimeBreakdown(NamedTuple):
    """Of the traced steps together; the phases and the rest make up their seconds."""

    seconds: float
    phases: dict[str, PhaseShare]
    overlapped_seconds: float


class TraceEvent(NamedTuple):
    """One entry of the profiler's list, in nanoseconds."""

    name: str
    begin: int
    end: int
    on_gpu: bool = False
    thread: int = 0
    number: int = 0  # of an entry on the CPU
    asked_by: int = 0  # of an entry on the GPU: the number of the operator that launched it
    annotation: bool = False  # whoever made the entry with record_function, the harness too


class StepTrace(Listener):
    """Hears steps with the profiler on; split() is theirs afterwards."""

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
        with record_function(_MARK + name):
            yield

    def split(self) -> TimeBreakdown | None:
        """None where the profiler saw nothing of the GPU, as where it is not permitted to."""
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
    """Divides traced steps by the operators of the threads that marked them; inside of these, waiting is none."""
    marks = [event for event in events if event.name.startswith(_MARK)]
    threads = {mark.thread for mark in marks}
    own = [event for event in events if event.thread in threads]
    operators = _spans(event for event in own if event.name.startswith(_COMPUTES))
    computing = difference(operators, _spans(event for event in own if event.name.startswith(_SENDS)))
    messages = difference(_spans(event for event in events if event.name.startswith(_MESSAGES)), computing)
    return _divided(_occurrences(marks), computing, _collectives(events), messages)


def gpu_time_breakdown(events: Sequence[TraceEvent]) -> TimeBreakdown | None:
    """Divides traced steps by kernels; a phase lasts from its first to its last, or to the first of the next."""
    marks = [event for event in events if event.name.startswith(_MARK) and not event.on_gpu]
    kernels = [event for event in events if event.on_gpu and not event.annotation]
    computing = [event for event in kernels if not event.name.startswith(_SENDS)]
    asked = {event.number: event.begin for event in events if not event.on_gpu}
    moments = np.array([asked.get(kernel.asked_by, 0) for kernel in computing], np.int64)
    times = np.array([(kernel.begin, kernel.end) for kernel in computing], np.int64).reshape(-1, 2)
    found = []
    for mark in marks:
        within = times[(moments >= mark.begin) & (moments < mark.end)]
        if len(within):
            found.append(mark._replace(begin=int(within[:, 0].min()), end=int(within[:, 1].max())))
    if not found:
        return None
    phases = _occurrences(found)
    begins = sorted(begin for name, spans_of in phases.items() if name != STEP_PHASE for begin, _ in spans_of)
    for name, spans_of in phases.items():
        if name != STEP_PHASE:
            following = ((begin, end, bisect_right(begins, begin)) for begin, end in spans_of)
            phases[name] = [(a, min([b, *begins[after : after + 1]])) for a, b, after in following]
    busy = merged_intervals((int(a), int(b)) for a, b in times)
    collectives = _collectives(kernels)
    whole = merged_intervals(phases[STEP_PHASE])
    return _divided(phases, busy, collectives, difference(difference(whole, busy), collectives))


def _divided(
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
    found: dict[str, list[tuple[int, int]]] = {}
    for mark in marks:
        found.setdefault(mark.name.removeprefix(_MARK), []).append((mark.begin, mark.end))
    return found


def _collectives(events: Iterable[TraceEvent]) -> Intervals:
    return _spans(e for e in events if e.name.startswith(_SENDS) and not e.name.startswith(_MESSAGES))


def _spans(events: Iterable[TraceEvent]) -> Intervals:
    return merged_intervals((event.begin, event.end) for event in events)
