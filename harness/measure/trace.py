"""Where a step's time goes between computing and communicating, from torch's own profiler.

Communication is exposed while a collective is in flight and no operator computes, overlapped while one does: the
measure of Holistic Trace Analysis. On a GPU both are kernels in their streams; on a CPU operators of the rank's thread
and the collectives of gloo's threads. Messages between pipeline stages are told apart: they are in flight from the
moment they are asked for until the other stage comes to them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.measure.probe import Listener
from harness.measure.spans import Spans, common, seconds, spans, without

STEP = "step"
REST = "rest"  # of a step, outside its phases
_MARK = "harness."  # before the names of phases, in the profiler's list
_SENDS = ("gloo:", "nccl", "c10d::", "_c10d_functional::", "deepspeed::")
_MESSAGES = ("gloo:send", "gloo:recv", "c10d::send", "c10d::recv", "ncclDevKernel_SendRecv")
_COMPUTES = ("aten::", "fsdp::")  # operators; an autograd node, a phase or a wrapper only contains them


class Share(NamedTuple):
    """Of one phase of a step: how long it took, and how long it communicated or waited without computing."""

    seconds: float
    exposed_seconds: float
    waiting_seconds: float  # for messages alone


class Split(NamedTuple):
    """Of the traced steps together; the phases and the rest make up their seconds."""

    seconds: float
    phases: dict[str, Share]
    overlapped_seconds: float


class Happened(NamedTuple):
    """One entry of the profiler's list, in nanoseconds."""

    name: str
    begin: int
    end: int
    on_gpu: bool
    thread: int


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

    def split(self) -> Split:
        assert self.profiler.profiler is not None and self.profiler.profiler.kineto_results is not None
        return split(
            Happened(
                event.name(),
                event.start_ns(),
                event.start_ns() + event.duration_ns(),
                event.device_type() != torch.profiler.DeviceType.CPU,
                event.start_thread_id(),
            )
            for event in self.profiler.profiler.kineto_results.events()
        )


def split(happened: Iterable[Happened]) -> Split:
    """Divides traced steps. Where there are marks on the GPU its timeline is the one that is divided."""
    events = list(happened)
    on_gpu = any(event.on_gpu and event.name.startswith(_MARK) for event in events)
    events = [event for event in events if event.on_gpu == on_gpu]
    marks = [event for event in events if event.name.startswith(_MARK)]
    if on_gpu:
        computing = _spans(e for e in events if not e.name.startswith((_MARK, *_SENDS)))
    else:
        threads = {mark.thread for mark in marks}
        innermost = _innermost(e for e in events if e.thread in threads)
        computing = _spans(e for e in innermost if e.name.startswith(_COMPUTES))
    waiting = without(_spans(e for e in events if e.name.startswith(_MESSAGES)), computing)
    collective = _spans(e for e in events if e.name.startswith(_SENDS) and not e.name.startswith(_MESSAGES))
    exposed = without(collective, computing)
    whole = _spans(mark for mark in marks if mark.name == _MARK + STEP)
    names = sorted({mark.name for mark in marks} - {_MARK + STEP})
    parts = {name.removeprefix(_MARK): _spans(mark for mark in marks if mark.name == name) for name in names}
    parts[REST] = without(whole, spans((int(a), int(b)) for part in parts.values() for a, b in part))
    shares = {
        name: Share(seconds(part), seconds(common(exposed, part)), seconds(without(common(waiting, part), exposed)))
        for name, part in parts.items()
    }
    return Split(seconds(whole), shares, seconds(common(common(collective, computing), whole)))


def _spans(events: Iterable[Happened]) -> Spans:
    return spans((event.begin, event.end) for event in events)


def _innermost(events: Iterable[Happened]) -> Iterator[Happened]:
    """Those of one thread with nothing inside them."""
    ordered = sorted(events, key=lambda event: (event.begin, -event.end))
    for event, following in zip(ordered, [*ordered[1:], None], strict=True):
        if following is None or following.begin >= event.end:
            yield event
