"""Time without waiting: marks set while steps run, read after the last of them."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from harness.probe import Listener

Mark = float | torch.cuda.Event


class DeviceClock:
    """Marks moments. On a GPU they are events in its stream: nothing waits while steps are timed."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.synchronize()

    def mark(self) -> Mark:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        """Between two marks, of which the later has passed: wait for the device before."""
        if isinstance(first, float) or isinstance(last, float):
            assert isinstance(first, float) and isinstance(last, float)
            return last - first
        return first.elapsed_time(last) / 1000  # type: ignore[no-any-return]


class StepTimes(Listener):
    """The time of whole steps and of the phases inside them. What a step spends outside its phases it waits.

    On a CPU a phase includes the collectives it waits for; a pipeline's receives and the global norm lie outside.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = DeviceClock(device)
        self.steps: list[Mark] = []
        self.spans: list[tuple[int, str, Mark, Mark]] = []

    def mark_step(self) -> None:
        """Before every step, and after the last."""
        self.steps.append(self.clock.mark())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self.clock.mark()
        yield
        self.spans.append((len(self.steps) - 1, name, begin, self.clock.mark()))

    def step_seconds(self) -> list[float]:
        if self.clock.on_gpu:
            torch.cuda.synchronize()
        return [self.clock.seconds(a, b) for a, b in pairwise(self.steps)]

    def phase_seconds(self) -> dict[str, list[float]]:
        """By phase, one sum a step."""
        if self.clock.on_gpu:
            torch.cuda.synchronize()
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(self.steps) - 1))
        for step, name, begin, end in self.spans:
            sums[name][step] += self.clock.seconds(begin, end)
        return dict(sums)
