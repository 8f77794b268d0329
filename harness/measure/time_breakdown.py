"""The division of a step's time into computing, communicating, copying and waiting, by a trace of what ran.

Communication is exposed while a collective is in flight and no operator computes, and overlapped while one does, as
Holistic Trace Analysis defines it. On a GPU both are kernels in their streams; on a CPU they are operators of the
rank's thread and collectives of gloo's threads. Messages between pipeline stages are separate: they are in flight from
their request until the other stage is ready for them. A GPU's copies (memcpy and memset, such as those of offload) are
neither: they hide no communication, and are exposed while nothing else runs. On a CPU copies are operators.

A kernel belongs to the phase in which any thread launched it. The profiler's own spans on the GPU are not used, because
they include only kernels of the thread that opened them, and backward runs in another thread.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.records.rank_report import OUTSIDE_PHASES, PhaseShare, TimeBreakdown

Intervals = np.ndarray[tuple[int, int], np.dtype[np.int64]]


STEP_PHASE = "step"

PREFIX = "harness."  # the prefix of phases' names in the profiler's list

COMMUNICATION = ("gloo:", "nccl", "c10d::", "_c10d_functional::", "deepspeed::")

_IN_FLIGHT = "gloo:"  # a collective from its request to its end, which is recorded in the thread that requested it

_MESSAGES = ("gloo:send", "gloo:recv", "c10d::send", "c10d::recv", "ncclDevKernel_SendRecv")

COMPUTATION = ("aten::", "fsdp::")  # operators; autograd nodes, phases and wrappers only contain them


# Activity types as torch's profiler and its trace files name them.
_KERNEL = "kernel"

_COPIES = ("gpu_memcpy", "gpu_memset")

_LAUNCHES = ("cuda_runtime", "cuda_driver")  # calls of the CUDA API, and of HIP's, which kineto names the same

GPU_ACTIVITIES = (_KERNEL, *_COPIES, *_LAUNCHES, "user_annotation")

_LAUNCHES_A_KERNEL = re.compile("^(?:cuda|cu|hip).*Launch.*Kernel")  # by name, such as cuLaunchKernelEx

MAX_LOST_SHARE = 0.01  # of a trace's kernels; shares of a step's time are no better known


class TraceEvent(NamedTuple):
    """One entry of the profiler's list. Times are in nanoseconds."""

    name: str
    start: int
    end: int
    activity: str = "cpu_op"  # such as kernel, gpu_memcpy, cuda_runtime, user_annotation
    thread: int = 0
    correlation_id: int = 0  # of a call of the CUDA API and of all that it launched on the GPU


def cpu_time_breakdown(events: Iterable[TraceEvent]) -> TimeBreakdown:
    """Divide the time of traced steps by the operators of the threads that marked them; no waiting is counted."""
    by_name: dict[str, list[TraceEvent]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(event)

    def named(*prefixes: str) -> list[TraceEvent]:
        return [event for name, listed in by_name.items() if name.startswith(prefixes) for event in listed]

    marks, communication = named(PREFIX), named(*COMMUNICATION)
    threads = {mark.thread for mark in marks}
    operators = _spans(event for event in named(*COMPUTATION) if event.thread in threads)
    launching = [event for event in communication if event.thread in threads and not event.name.startswith(_IN_FLIGHT)]
    computing = difference(operators, _spans(launching))
    messages = difference(_spans(named(*_MESSAGES)), computing)
    return _divide(_occurrences(marks), computing, _collectives(communication), messages)


def trace_problem(events: Sequence[TraceEvent]) -> str:
    """Return why a GPU's trace does not show where its steps' time went: too many kernels are missing; else ''.

    The profiler records nothing without permission, and drops records when its buffers are full or when the clocks of
    host and device disagree. Each of these leaves a line in its own log at most.
    """
    steps = [event for event in events if event.name == PREFIX + STEP_PHASE and event.activity == "user_annotation"]
    starts, ends = _times(sorted(steps, key=lambda step: step.start)).T
    launches = [event for event in events if event.activity in _LAUNCHES and _LAUNCHES_A_KERNEL.match(event.name)]
    moments = np.array([event.start for event in launches], np.int64)
    in_steps = np.searchsorted(starts, moments, side="right") > np.searchsorted(ends, moments, side="right")
    recorded = {event.correlation_id for event in events if event.activity in (_KERNEL, *_COPIES)}
    launched = {event.correlation_id for event, is_inside in zip(launches, in_steps, strict=True) if is_inside}
    lost = len(launched - recorded)
    if recorded and lost <= MAX_LOST_SHARE * len(launched):
        return ""
    return f"torch's profiler recorded {len(launched) - lost:,} of the {len(launched):,} kernels that were launched"


def gpu_time_breakdown(events: Sequence[TraceEvent]) -> TimeBreakdown | None:
    """Divide traced steps by kernels and copies, if trace_problem() finds that they are there.

    A phase lasts from its first kernel or copy to its last, or to the next phase's first.
    """
    marks = [event for event in events if event.name.startswith(PREFIX) and event.activity == "user_annotation"]
    kernels = [event for event in events if event.activity == _KERNEL]
    computing = [event for event in kernels if not event.name.startswith(COMMUNICATION)]
    copies = [event for event in events if event.activity in _COPIES]
    own = computing + copies
    moments, times = _launch_moments(events, own), _times(own)
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
    busy, collectives, copying = _spans(computing), _collectives(kernels), _spans(copies)
    waiting = difference(difference(difference(merged_intervals(phases[STEP_PHASE]), busy), collectives), copying)
    return _divide(phases, busy, collectives, waiting, copying)


def _launch_moments(events: Iterable[TraceEvent], launched: Sequence[TraceEvent]) -> Intervals:
    """Return the moments at which kernels and copies were launched; 0 where the launch was not recorded.

    Only calls of the CUDA API are looked up. Operators have numbers of their own, which may be the same.
    """
    launches = {event.correlation_id: event.start for event in events if event.activity in _LAUNCHES}
    return np.array([launches.get(event.correlation_id, 0) for event in launched], np.int64)


def _times(events: Sequence[TraceEvent]) -> Intervals:
    """Return start and end of every event, in their order."""
    return np.array([(event.start, event.end) for event in events], np.int64).reshape(-1, 2)


def _divide(
    phases: Mapping[str, Sequence[tuple[int, int]]],
    computing: Intervals,
    collectives: Intervals,
    waiting: Intervals,
    copying: Intervals | None = None,
) -> TimeBreakdown:
    exposed, whole = difference(collectives, computing), merged_intervals(phases[STEP_PHASE])
    copying = merged_intervals(()) if copying is None else difference(difference(copying, computing), collectives)
    parts = {name: intersection(merged_intervals(pairs), whole) for name, pairs in phases.items() if name != STEP_PHASE}
    parts[OUTSIDE_PHASES] = difference(
        whole, merged_intervals((int(a), int(b)) for part in parts.values() for a, b in part)
    )
    shares = {
        name: PhaseShare(
            total_seconds(part),
            total_seconds(intersection(exposed, part)),
            total_seconds(difference(intersection(waiting, part), exposed)),
            total_seconds(intersection(copying, part)),
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
        occurrences.setdefault(mark.name.removeprefix(PREFIX), []).append((mark.start, mark.end))
    return occurrences


def _collectives(events: Iterable[TraceEvent]) -> Intervals:
    return _spans(e for e in events if e.name.startswith(COMMUNICATION) and not e.name.startswith(_MESSAGES))


def _spans(events: Iterable[TraceEvent]) -> Intervals:
    return merged_intervals((event.start, event.end) for event in events)


_Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


def merged_intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of (start, end) pairs, in order and without overlaps."""
    ordered = np.array(list(pairs), np.int64).reshape(-1, 2)
    if not len(ordered):
        return ordered
    ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate(([True], ordered[1:, 0] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((ordered[first, 0], reached[last]), axis=1)


def total_seconds(intervals: Intervals) -> float:
    """Return the total length in seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum()) / 1e9


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Return the times that both cover."""
    return _where(first, second, lambda in_first, in_second: in_first & in_second)


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Return the times that `first` covers and `second` does not."""
    return _where(first, second, lambda in_first, in_second: in_first & ~in_second)


def _where(first: Intervals, second: Intervals, is_wanted: Callable[[_Flags, _Flags], _Flags]) -> Intervals:
    """Return the times between neighboring edges of two unions that are wanted, by which of the two cover them."""
    edges = np.concatenate((first.ravel(), second.ravel()))
    order = np.argsort(edges, kind="stable")
    of_first = np.concatenate((np.tile([1, -1], len(first)), np.zeros(second.size, np.int64)))
    of_second = np.concatenate((np.zeros(first.size, np.int64), np.tile([1, -1], len(second))))
    in_first, in_second = (np.cumsum(changes[order])[:-1] > 0 for changes in (of_first, of_second))
    starts, ends = edges[order][:-1], edges[order][1:]
    wanted = is_wanted(in_first, in_second) & (starts < ends)
    starts, ends = starts[wanted], ends[wanted]
    if not len(starts):
        return np.zeros((0, 2), np.int64)
    is_new = starts[1:] > ends[:-1]
    return np.stack((starts[np.concatenate(([True], is_new))], ends[np.concatenate((is_new, [True]))]), axis=1)
