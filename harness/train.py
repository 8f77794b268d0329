"""The one loop: warm-up, timed steps, then one profiled step. It knows nothing of strategies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from harness.config import TrainConfig
from harness.engines import Batch, Engine, StepResult
from harness.measure.gradients import GradientStatistic, GradientStatistics, statistics
from harness.measure.memory import DeviceMemory
from harness.measure.probe import Probe
from harness.measure.profile import ProfiledStep, profiling
from harness.measure.timing import StepTimes


@dataclass(frozen=True)
class Measurements:
    """What one rank saw. Losses and norms cover every step; seconds the timed ones, whole steps with their data."""

    losses: list[float]
    grad_norms: list[float]
    step_seconds: list[float]
    phase_seconds: dict[str, list[float]]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    first_gradients: list[GradientStatistic]
    first_moments: list[GradientStatistic]  # of gradients as the optimizer took them, clipped
    last_parameters: list[GradientStatistic]
    last_masters: list[GradientStatistic]
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
    first_moments = statistics(engine, "optimizer", config.seed, "exp_avg")
    for _ in range(config.warmup_steps - 1):
        step("warm-up")

    dist.barrier()
    memory.reset_peak()
    times = StepTimes(memory.device)
    with probe.listening(times):
        for _ in range(config.steps):
            times.mark_step()
            step("timed")
        times.mark_step()
    step_seconds, phase_seconds = times.step_seconds(), times.phase_seconds()
    peak_allocated_bytes, peak_reserved_bytes = memory.peak_allocated_bytes(), memory.peak_reserved_bytes()

    with profiling(engine, probe, memory, config.seed) as profiled:
        step("profiled")
    return Measurements(
        losses=[float(result.loss) for result in results],
        grad_norms=[float(result.grad_norm) for result in results],
        step_seconds=step_seconds,
        phase_seconds=phase_seconds,
        peak_allocated_bytes=peak_allocated_bytes,
        peak_reserved_bytes=peak_reserved_bytes,
        first_gradients=first_gradients.found,
        first_moments=first_moments,
        last_parameters=statistics(engine, "parameters", config.seed),
        last_masters=statistics(engine, "optimizer", config.seed, "master"),
        profiled=profiled.result(),
    )
