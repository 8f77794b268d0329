"""Timing of steps without synchronization: marks are set while steps run and read after the last one."""

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from harness.probe import Listener

Mark = float | torch.cuda.Event


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Let Python collect no garbage inside the block: a pause of one rank would stall all that wait for it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DeviceClock:
    """A clock whose marks on a GPU are events in its stream, so that nothing waits while steps are timed."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.synchronize()

    def mark(self) -> Mark:
        """Mark the present moment."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        """Return the seconds between two marks. The device must have passed the later one: synchronize before."""
        if isinstance(first, float) or isinstance(last, float):
            assert isinstance(first, float) and isinstance(last, float)
            return last - first
        return first.elapsed_time(last) / 1000  # type: ignore[no-any-return]


class StepTimes(Listener):
    """A listener that times whole steps and the phases inside them. Time outside the phases is spent waiting.

    On a CPU a phase includes the collectives that it waits for; a pipeline's receives and the global norm lie outside.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = DeviceClock(device)
        self.steps: list[Mark] = []
        self.spans: list[tuple[int, str, Mark, Mark]] = []

    def mark_step(self) -> None:
        """Mark a step's boundary: call this before every step and after the last."""
        self.steps.append(self.clock.mark())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step."""
        start = self.clock.mark()
        yield
        self.spans.append((len(self.steps) - 1, name, start, self.clock.mark()))

    def step_seconds(self) -> list[float]:
        """Return the seconds of each step, once the device has passed the last one."""
        if self.clock.on_gpu:
            torch.cuda.synchronize()
        return [self.clock.seconds(a, b) for a, b in pairwise(self.steps)]

    def phase_seconds(self) -> dict[str, list[float]]:
        """Return the seconds of each phase, summed per step, after step_seconds() has waited for the device."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(self.steps) - 1))
        for step, name, start, end in self.spans:
            sums[name][step] += self.clock.seconds(start, end)
        return dict(sums)
