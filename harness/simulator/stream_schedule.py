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
from dataclasses import dataclass, field

from harness.simulator.kernel_work import Collective, HostCopy, Transfers, Work
from harness.simulator.operator_stream import HOST, Launch

ROUNDING_SECONDS = 1e-12  # a kernel that has so little left has ended


@dataclass(frozen=True)
class Rates:
    """The seconds in which the host launches a kernel, and by how much communication slows down what computes."""

    launch_seconds: float
    overlap_slowdown: float  # in seconds of computing for each second beside communication


@dataclass
class Schedule:
    """When each launch runs, and what the device does in each second of a step: the parts add up to the step."""

    starts: list[float]
    ends: list[float]
    phase_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # computing
    exposed_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by axis
    copy_seconds: float = 0.0  # between device and host, beside neither computing nor communication
    idle_seconds: float = 0.0
    overlapped_seconds: float = 0.0  # communication beside computing, which is part of the phases

    @property
    def step_seconds(self) -> float:
        """The seconds from the first launch to the end of the last kernel."""
        return max(self.ends, default=0.0)

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


def kind_of(work: Work | None) -> str:
    """Return whether a kernel computes, communicates or copies between device and host."""
    if isinstance(work, Collective | Transfers):
        return "communication"
    return "copy" if isinstance(work, HostCopy) else "compute"


def play(launches: Sequence[Launch], seconds: Sequence[float], rates: Rates) -> Schedule:
    """Return when launches run that take so many seconds each where nothing runs beside them."""
    return Player(launches, seconds, rates).play()


class Player:
    """The state of a device and its host while they play the launches of a step."""

    def __init__(self, launches: Sequence[Launch], seconds: Sequence[float], rates: Rates) -> None:
        self.launches, self.rates = launches, rates
        self.left = list(seconds)  # of each launch, in seconds of its own
        self.starts, self.ends = [math.inf] * len(launches), [math.inf] * len(launches)
        self.queued_at = [math.inf] * len(launches)
        self.streams: dict[str, deque[int]] = {}
        self.running: dict[str, int] = {}
        self.host_next, self.host_time = 0, 0.0

    def play(self) -> Schedule:
        """Play all launches."""
        schedule, now = Schedule(self.starts, self.ends), 0.0
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
            schedule.spend(then - now, [self.launches[number] for number in running])
            for number in running:
                self.left[number] -= (then - now) * speeds[number]
                if self.left[number] <= ROUNDING_SECONDS:
                    self.ends[number] = then
                    del self.running[self.launches[number].stream]
            now = then
        if self.host_next < len(self.launches) or any(self.streams.values()):
            raise RuntimeError("launches wait for each other for ever")
        schedule.idle_seconds += max(0.0, schedule.step_seconds - now)  # the host goes on after the last kernel
        return schedule

    def speeds(self, running: Sequence[int]) -> Mapping[int, float]:
        """Return the speed of each launch that runs."""
        kinds = {number: kind_of(self.launches[number].work) for number in running}
        beside = max(0.0, 1.0 - self.rates.overlap_slowdown) if "communication" in kinds.values() else 1.0
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
                self.host_time += self.rates.launch_seconds
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
