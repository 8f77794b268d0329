"""When a device runs the launches of a rank's step: one host thread, streams, and what runs beside each other.

The host takes the same time for every launch and runs ahead of the device until it waits for it; what it does itself
keeps it from launching, and counts as idle time of the device where this has nothing else to do. A kernel begins when
it is launched, when the one before it on its stream has ended, and when all that it waits for has. Kernels of
several streams run beside each other; while anything communicates, those that compute are slower. Other ranks are not
simulated: a collective begins when this rank's streams reach it, and so does a transfer between pipeline stages.
Collectives of different communicators do not share their links here.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from harness.config.hardware import FittedHardware
from harness.records.rank_report import SimulatedTime
from harness.simulator.kernel_work import Communication, HostLinkCopy, Work
from harness.simulator.operator_stream import HOST, Launch

ROUNDING_SECONDS = 1e-12  # a kernel that has so little left has ended


def kind_of(work: Work | None) -> str:
    """Return whether a kernel computes, communicates or copies between device and host."""
    if isinstance(work, Communication):
        return "communication"
    return "copy" if isinstance(work, HostLinkCopy) else "compute"


class Player:
    """The state of a device and its host while they play the launches of a step."""

    def __init__(self, launches: Sequence[Launch], seconds: Sequence[float], hardware: FittedHardware) -> None:
        self.launches, self.hardware = launches, hardware
        self.left = list(seconds)  # of each launch, in seconds of its own
        self.starts, self.ends = [math.inf] * len(launches), [math.inf] * len(launches)
        self.queued_at = [math.inf] * len(launches)
        self.streams: dict[str, deque[int]] = {}
        self.running: dict[str, int] = {}
        self.host_next, self.host_time = 0, 0.0
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        self.exposed_seconds: defaultdict[str, float] = defaultdict(float)
        self.copy_seconds = self.idle_seconds = self.overlapped_seconds = 0.0

    def play(self) -> SimulatedTime:
        """Play all launches, and return the time of the step and its parts."""
        now = 0.0
        while True:
            self.launch_from_host()
            next_start = self.start_kernels(now)
            running = sorted(self.running.values(), key=lambda number: self.launches[number].stream)
            speeds = self.speeds(running)
            next_end = min(
                (now + self.left[number] / speeds[number] for number in running if speeds[number]), default=math.inf
            )
            then = min(next_start, next_end)
            if then == math.inf:
                break
            self.spend(then - now, [self.launches[number] for number in running])
            for number in running:
                self.left[number] -= (then - now) * speeds[number]
                if self.left[number] <= ROUNDING_SECONDS:
                    self.ends[number] = then
                    del self.running[self.launches[number].stream]
            now = then
        if self.host_next < len(self.launches) or any(self.streams.values()):
            raise RuntimeError("launches wait for each other for ever")
        step_seconds = max(self.ends, default=0.0)
        return SimulatedTime(
            step_seconds,
            dict(self.phase_seconds),
            dict(self.exposed_seconds),
            self.overlapped_seconds,
            self.copy_seconds,
            self.idle_seconds + max(0.0, step_seconds - now),  # the host goes on after the last kernel
        )

    def spend(self, seconds: float, running: Sequence[Launch]) -> None:
        """Count the seconds in which these launches run."""
        computing = [launch for launch in running if kind_of(launch.work) == "compute"]
        communicating = [launch for launch in running if kind_of(launch.work) == "communication"]
        if computing:
            self.phase_seconds[computing[0].phase] += seconds
            self.overlapped_seconds += seconds if communicating else 0.0
        elif communicating:
            self.exposed_seconds[communicating[0].axis] += seconds
        elif running:
            self.copy_seconds += seconds
        else:
            self.idle_seconds += seconds

    def speeds(self, running: Sequence[int]) -> Mapping[int, float]:
        """Return the speed of each launch that runs."""
        kinds = {number: kind_of(self.launches[number].work) for number in running}
        beside = max(0.0, 1.0 - self.hardware.overlap_slowdown) if "communication" in kinds.values() else 1.0
        return {number: beside if kind == "compute" else 1.0 for number, kind in kinds.items()}

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
