"""The time of an operation that all ranks run at the same moment: the median of the slowest rank's samples."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

SAMPLE_SECONDS = 0.002  # at least so long, so that the clock and the barrier before it do not count
FEWEST_SAMPLES, MOST_SAMPLES = 5, 50
MOST_CALLS = 1000  # of one sample


@dataclass(frozen=True)
class Stopwatch:
    """A clock for one device and a time for each point."""

    device: torch.device
    budget_seconds: float  # for the samples of one point

    def synchronize(self) -> None:
        """Wait until the device has finished what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: float, group: dist.ProcessGroup | None = None) -> float:
        """Return the most seconds of any rank; all ranks wait for each other."""
        most = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return float(most)

    def sample(self, operation: Callable[[], object], calls: int, waits: bool) -> float:
        """Return the seconds of one call; with `waits` the device's, otherwise those in which the host launches it."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            operation()
        if waits:
            self.synchronize()
        seconds = time.perf_counter() - start
        self.synchronize()
        return seconds / calls

    def median_seconds(
        self, operation: Callable[[], object], group: dist.ProcessGroup | None = None, waits: bool = True
    ) -> float:
        """Return the median seconds of an operation, which all ranks of the group call together.

        The first two calls do not count: they allocate, and connect the ranks of a group.
        """
        for _ in range(2):
            operation()
        once = self.slowest(self.sample(operation, 1, waits), group)
        calls = min(MOST_CALLS, max(1, math.ceil(SAMPLE_SECONDS / max(once, 1e-9))))
        number = int(self.budget_seconds / (calls * max(once, 1e-9)))
        samples = []
        for _ in range(min(MOST_SAMPLES, max(FEWEST_SAMPLES, number))):
            self.slowest(0.0, group)  # all ranks begin together
            samples.append(self.sample(operation, calls, waits))
        return self.slowest(statistics.median(samples), group)
