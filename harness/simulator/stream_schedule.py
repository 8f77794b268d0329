"""When a device runs the launches of a rank's step: one host thread, streams, and what runs beside each other.

The host takes the same time for every launch and runs ahead of the device until it waits for it; what it does itself
keeps it from launching, and counts as idle time of the device where this has nothing else to do. A kernel begins when
it is launched, when the one before it on its stream has ended, and when all that it waits for has. Kernels of
several streams run beside each other; while anything communicates, those that compute are slower. Other ranks are not
simulated: a collective begins when this rank's streams reach it, and so does a transfer between pipeline stages.
Collectives of different communicators do not share their links here.
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.config.hardware import FittedHardware
from harness.hardware.machine import described_cluster
from harness.records.rank_report import SimulatedTime
from harness.simulator.kernel_work import Collective, Communication, HostLinkCopy, Transfers, Work, work_seconds
from harness.simulator.operator_stream import HOST, Launch
from harness.simulator.process import StepRequest
from harness.util.text import UserError

ROUNDING_SECONDS = 1e-12  # a kernel that has so little left has ended


@dataclass(frozen=True)
class TimedStep:
    """The launches of a rank's step, when each runs, and the summary that the rank reports."""

    rank: int
    launches: Sequence[Launch]
    starts: Sequence[float]
    ends: Sequence[float]
    summary: SimulatedTime


def time_step(request: StepRequest, launches: Sequence[Launch]) -> TimedStep | None:
    """Return when a step's launches run on the request's cluster; None where its hardware or peak is not known."""
    hardware = request.config.cluster.hardware
    if hardware is None or request.device == "cpu":
        return None
    gpus_per_node = described_cluster(request.config.cluster).gpus_per_node
    try:
        seconds = [
            0.0 if launch.work is None else work_seconds(launch.work, hardware, gpus_per_node) for launch in launches
        ]
    except UserError:
        return None
    return Player(launches, seconds, hardware.fitted).play(request.rank)


def kind_of(work: Work | None) -> str:
    """Return whether a kernel computes, communicates or copies between device and host."""
    if isinstance(work, Communication):
        return "communication"
    return "copy" if isinstance(work, HostLinkCopy) else "compute"


class Player:
    """The state of a device and its host while they play the launches of a step."""

    def __init__(self, launches: Sequence[Launch], seconds: Sequence[float], hardware: FittedHardware) -> None:
        self.launches, self.seconds, self.hardware = launches, seconds, hardware
        self.kinds = [kind_of(launch.work) for launch in launches]
        self.left = list(seconds)  # of each launch, in seconds of its own
        self.starts, self.ends, self.queued_at = ([math.inf] * len(launches) for _ in range(3))
        self.streams: dict[str, deque[int]] = {}
        self.running: dict[str, int] = {}
        self.host_next, self.host_time = 0, 0.0
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        self.exposed_seconds: defaultdict[str, float] = defaultdict(float)
        self.copy_seconds = self.idle_seconds = self.overlapped_seconds = 0.0

    def play(self, rank: int) -> TimedStep:
        """Play all launches, and return the step with its time and the parts of it."""
        now = 0.0
        while True:
            self.launch_from_host()
            next_start = self.start_kernels(now)
            running = sorted(self.running.values(), key=lambda number: self.launches[number].stream)
            kinds = {number: self.kinds[number] for number in running}
            beside = max(0.0, 1.0 - self.hardware.overlap_slowdown) if "communication" in kinds.values() else 1.0
            speeds = {number: beside if kind == "compute" else 1.0 for number, kind in kinds.items()}
            then = min([next_start, *(now + self.left[number] / speed for number, speed in speeds.items() if speed)])
            if then == math.inf:
                break
            self.spend(then - now, running)
            for number, speed in speeds.items():
                self.left[number] -= (then - now) * speed
                if self.left[number] <= ROUNDING_SECONDS:
                    self.ends[number] = then
                    del self.running[self.launches[number].stream]
            now = then
        if self.host_next < len(self.launches) or any(self.streams.values()):
            raise RuntimeError("launches wait for each other for ever")
        return TimedStep(rank, self.launches, self.starts, self.ends, self.summary(now))

    def summary(self, last_end: float) -> SimulatedTime:
        """Return the time of the step, whose last kernel ended at a moment, and its parts."""
        step_seconds = max(self.ends, default=0.0)
        operator_seconds: defaultdict[str, float] = defaultdict(float)  # of each kernel as if it ran alone
        for launch, own in zip(self.launches, self.seconds, strict=True):
            if launch.work is not None:
                operator_seconds[launch.operator] += own
        kinds = zip(self.launches, self.kinds, strict=True)
        return SimulatedTime(
            step_seconds,
            dict(self.phase_seconds),
            dict(self.exposed_seconds),
            self.overlapped_seconds,
            self.copy_seconds,
            self.idle_seconds + max(0.0, step_seconds - last_end),  # the host goes on after the last kernel
            operator_seconds=dict(sorted(operator_seconds.items(), key=lambda item: -item[1])),
            communication_operators=sorted({launch.operator for launch, kind in kinds if kind == "communication"}),
            launches=len(self.launches),
        )

    def spend(self, seconds: float, running: Sequence[int]) -> None:
        """Count the seconds in which these launches run, for the first that computes, or else communicates."""
        first_of_kind = {self.kinds[number]: self.launches[number] for number in reversed(running)}
        computing, communicating = first_of_kind.get("compute"), first_of_kind.get("communication")
        if computing:
            self.phase_seconds[computing.phase] += seconds
            self.overlapped_seconds += seconds if communicating else 0.0
        elif communicating:
            self.exposed_seconds[communicating.axis] += seconds
        elif running:
            self.copy_seconds += seconds
        else:
            self.idle_seconds += seconds

    def launch_from_host(self) -> None:
        """Let the host launch until it has to wait for a kernel that has not ended."""
        while self.host_next < len(self.launches):
            number = self.host_next
            launch = self.launches[number]
            if launch.work is None:
                end = max((self.ends[other] for other in launch.after), default=0.0)
                if end == math.inf:
                    return
                self.host_time = max(self.host_time, end)
                self.starts[number] = self.ends[number] = self.host_time
            elif launch.stream == HOST:
                self.starts[number] = self.host_time
                self.ends[number] = self.host_time = self.host_time + self.left[number]
            else:
                self.host_time += self.hardware.launch_seconds
                self.queued_at[number] = self.host_time
                self.streams.setdefault(launch.stream, deque()).append(number)
            self.host_next += 1

    def start_kernels(self, now: float) -> float:
        """Start what can start now, and return when the next kernel can that only waits for its launch."""
        next_start = math.inf
        for stream, queue in self.streams.items():
            if not queue or stream in self.running:
                continue
            number = queue[0]
            ready = max(self.queued_at[number], *(self.ends[other] for other in self.launches[number].after), 0.0)
            if ready <= now:
                queue.popleft()
                self.running[stream] = number
                self.starts[number] = now
            else:
                next_start = min(next_start, ready)
        return next_start


Event = dict[str, Any]

MICROSECONDS = 1e6

PHASES = "phases"  # the name of the row that shows them


def trace_events(step: TimedStep) -> Iterator[Event]:
    """Yield the events of a rank's step, which is a process of the trace; its streams are threads."""
    rank, times = step.rank, zip(step.launches, step.starts, step.ends, strict=True)
    kernels = [(launch, start, end) for launch, start, end in times if launch.work is not None]
    streams = [PHASES, *sorted({launch.stream for launch, _, _ in kernels})]
    threads = {stream: number for number, stream in enumerate(streams)}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for stream, thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}
    for phase, of_phase in groupby(kernels, key=lambda kernel: kernel[0].phase):
        _, starts, ends = zip(*of_phase, strict=True)
        yield _event(phase, rank, threads[PHASES], min(starts), max(ends))
    for launch, start, end in kernels:
        yield _event(launch.name, rank, threads[launch.stream], start, end) | {"args": _arguments(launch)}


def _event(name: str, rank: int, thread: int, start: float, end: float) -> Event:
    """Return an event with its times in microseconds, to a nanosecond."""
    times = {"ts": round(start * MICROSECONDS, 3), "dur": round((end - start) * MICROSECONDS, 3)}
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, **times}


def _arguments(launch: Launch) -> dict[str, Any]:
    """Return what the trace shows of a kernel when it is selected."""
    work: Any = launch.work
    values: dict[str, Any] = work._asdict()
    if isinstance(work, Collective):
        values["ranks"] = len(work.ranks)
    elif isinstance(work, Transfers):
        values = {"transfers": [" ".join(map(str, part)) for part in work.parts]}
    return values | ({"axis": launch.axis} if launch.axis else {})


def write_trace(path: Path, steps: Sequence[TimedStep]) -> None:
    """Write the events of the steps of all simulated ranks."""
    events = [event for step in steps for event in trace_events(step)]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")))
