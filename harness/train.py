"""The one loop: warm-up, timed steps, then one profiled step. It knows nothing of strategies."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from harness.config import TrainConfig
from harness.engines import Batch, Engine, StepResult
from harness.measure.gradients import GradientStatistic, GradientStatistics
from harness.measure.memory import DeviceMemory
from harness.measure.probe import Probe
from harness.measure.profile import ProfiledStep, profiling


@dataclass(frozen=True)
class Measurements:
    """What one rank saw. Losses and norms cover every step; seconds the timed ones, whole steps with their data."""

    losses: list[float | None]
    grad_norms: list[float]
    step_seconds: list[float]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    first_gradients: list[GradientStatistic]
    profiled: ProfiledStep


def train(
    engine: Engine,
    probe: Probe,
    batches: Callable[[int], Sequence[Batch]],
    config: TrainConfig,
    memory: DeviceMemory,
    progress: Callable[[str, int], None],
) -> Measurements:
    """Trains warmup_steps + steps + 1 steps and returns what was measured on the way."""
    results: list[StepResult] = []

    def step(phase: str) -> None:
        progress(phase, len(results))
        results.append(engine.step(batches(len(results))))

    first_gradients = GradientStatistics(config.seed)
    with probe.listening(first_gradients):
        step("warm-up")
    for _ in range(config.warmup_steps - 1):
        step("warm-up")

    dist.barrier()
    memory.reset_peak()
    clock = Clock(memory.device)
    for _ in range(config.steps):
        clock.mark()
        step("timed")
    clock.mark()
    step_seconds = clock.seconds()
    peak_allocated_bytes, peak_reserved_bytes = memory.peak_allocated_bytes(), memory.peak_reserved_bytes()

    with profiling(engine, probe, memory, config.seed) as profiled:
        step("profiled")
    return Measurements(
        losses=[None if result.loss is None else float(result.loss) for result in results],
        grad_norms=[float(result.grad_norm) for result in results],
        step_seconds=step_seconds,
        peak_allocated_bytes=peak_allocated_bytes,
        peak_reserved_bytes=peak_reserved_bytes,
        first_gradients=first_gradients.found,
        profiled=profiled.result(),
    )


class Clock:
    """Marks between steps. On a GPU they are events, read after the last: nothing waits while steps are timed."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[float] = []
        self.events: list[torch.cuda.Event] = []
        if self.on_gpu:
            torch.cuda.synchronize()

    def mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.events.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between every two marks."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in pairwise(self.events)]
        return [b - a for a, b in pairwise(self.marks)]
