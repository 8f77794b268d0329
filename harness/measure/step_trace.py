"""The trace of a few steps: what ran when, by torch's profiler or, on a CPU, by the harness's own log of operators.

Both list the same operators and collectives of a CPU. The profiler knows much more about each of them, and needs more
than a step's time to write it down where steps are short.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from harness.measure.operator_log import OperatorLog
from harness.measure.time_breakdown import (
    COMMUNICATION,
    COMPUTATION,
    GPU_ACTIVITIES,
    PREFIX,
    TraceEvent,
    cpu_time_breakdown,
    gpu_time_breakdown,
    trace_problem,
)
from harness.probe import Listener


class StepTrace(Listener):
    """A listener that traces the steps inside its context; report() divides their time afterwards.

    Call warm_up() at least one step before, because the first steps after torch's profiler has attached itself to a GPU
    are slow, and not equally so on all ranks. Without an operator log, a CPU is traced by torch's profiler as well.
    """

    def __init__(self, device: torch.device, operator_log: OperatorLog | None = None) -> None:
        self.on_gpu = device.type == "cuda"
        self.tracer = ProfilerTracer(self.on_gpu) if self.on_gpu or operator_log is None else operator_log

    def warm_up(self) -> None:
        """Attach the profiler to the device without recording anything yet, as torch's schedule(warmup=1) does."""
        if isinstance(self.tracer, ProfilerTracer):
            self.tracer.profiler.prepare_trace()

    def __enter__(self) -> "StepTrace":
        self.tracer.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        self.tracer.end()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase in the trace."""
        with record_function(PREFIX + name):
            yield

    def report(self) -> dict[str, Any]:
        """Return the fields of a rank's report: the breakdown, or None and how few of a GPU's kernels were recorded."""
        events = self.tracer.events()
        problem = trace_problem(events) if self.on_gpu else ""
        divide = gpu_time_breakdown if self.on_gpu else cpu_time_breakdown
        return {"time_breakdown": None if problem else divide(events), "trace_problem": problem}


class ProfilerTracer:
    """A tracer by torch's profiler, of a CPU and, if asked, of a GPU."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])

    def begin(self) -> None:
        """Log what this thread runs from now on, after prepare_trace()."""
        self.profiler.start_trace()

    def end(self) -> None:
        """Stop logging."""
        self.profiler.stop_trace()

    def events(self) -> list[TraceEvent]:
        """Return those of the profiler's entries that divide the device's time."""
        assert self.profiler.profiler is not None and self.profiler.profiler.kineto_results is not None
        listed = self.profiler.profiler.kineto_results.events()
        if not self.on_gpu:
            return list(outermost_events(listed))
        return [event for event in map(_gpu_event, listed) if event.activity in GPU_ACTIVITIES]


def outermost_events(listed: Iterable[Any]) -> Iterator[TraceEvent]:
    """Yield those of the profiler's entries that divide a CPU's time.

    Operators inside others, which are most of them, add nothing to the time in which a thread computes.
    """
    spans: dict[int, tuple[int, int]] = {}  # of the last operator of each thread
    for event in listed:
        name = event.name()
        if not name.startswith((PREFIX, *COMPUTATION, *COMMUNICATION)):
            continue
        start, thread = event.start_ns(), event.start_thread_id()
        if name.startswith(COMPUTATION):
            first, last = spans.get(thread, (0, 0))
            if first <= start < last:
                continue
            spans[thread] = (start, event.end_ns())
        yield TraceEvent(name, start, event.end_ns(), "cpu_op", thread)


def _gpu_event(event: Any) -> TraceEvent:
    return TraceEvent(
        event.name(),
        event.start_ns(),
        event.end_ns(),
        activity_of(event),
        event.start_thread_id(),
        event.correlation_id(),
    )


def activity_of(event: Any) -> str:
    """Return the type of a profiler's entry as trace files name it, by its name and device up to torch 2.11."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    name: str = event.name()
    if event.device_type() == DeviceType.CPU:
        other = "cuda_runtime" if name.startswith(("cu", "hip")) else "cpu_op"
        return "user_annotation" if event.is_user_annotation() else other
    if event.is_user_annotation():
        return "gpu_user_annotation"
    return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
