"""The one loop: warm-up, timed, traced and one profiled step. It knows nothing of strategies."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness import compiling
from harness.config import TRACED_STEPS, TrainConfig
from harness.engines import Batch, Engine
from harness.layout import Layout
from harness.measure.gradients import GradientStatistic, GradientStatistics, statistics
from harness.measure.memory import Counters, DeviceMemory
from harness.measure.probe import Probe
from harness.measure.profile import profiling
from harness.measure.profiled import ProfiledStep
from harness.measure.timing import StepTimes
from harness.measure.trace import STEP, Split, StepTrace
from harness.measure.usage import Usage, Used


@dataclass(frozen=True)
class Measurements:
    """What one rank saw. Losses and norms cover every step; seconds the timed ones, whole steps with their data."""

    losses: list[float]
    grad_norms: list[float]
    step_seconds: list[float]
    phase_seconds: dict[str, list[float]]
    memory: Counters  # in the timed steps
    used: Used
    first_gradients: list[GradientStatistic]
    first_moments: list[GradientStatistic]  # of gradients as the optimizer took them, clipped
    last_parameters: list[GradientStatistic]
    last_masters: list[GradientStatistic]
    graphs_in_timed_steps: int  # compiled in them
    traced: Split | None
    profiled: ProfiledStep


def train(
    engine: Engine,
    probe: Probe,
    batches: Callable[[int], Sequence[Batch]],
    config: TrainConfig,
    layout: Layout,
    memory: DeviceMemory,
    progress: Callable[[str, int], None],
    snapshot: Path | None = None,
) -> Measurements:
    """Trains all of config's steps and returns what was measured on the way; `snapshot` is where one of memory goes."""
    # Made before the first step, so that the memory of one step is that of the next.
    losses, grad_norms = torch.zeros(2, config.all_steps, device=memory.device)
    number = itertools.count()

    def step(phase: str) -> None:
        index = next(number)
        progress(phase, index)
        with probe.phase("data"):
            micro_batches = batches(index)
        result = engine.step(micro_batches)
        with torch.no_grad():
            losses[index], grad_norms[index] = result.loss, result.grad_norm

    first_gradients = GradientStatistics(config.seed, memory.device, memory.limit.beyond)
    first_moments = None
    for taken in range(config.warmup_steps):
        if first_moments is not None:
            step("warm-up")
            continue
        with probe.listening(first_gradients):
            step("warm-up")
        if engine.skipped_steps <= taken:  # else gradients overflowed: a smaller loss scale comes next
            with memory.limit.beyond():
                first_moments = statistics(engine, "optimizer", config.seed, memory.device, "exp_avg")
            memory.forget_unused()  # of these statistics
    if first_moments is None:
        raise FloatingPointError(
            "gradients overflowed in every warm-up step: precision.initial_loss_scale is too large"
        )

    usage = Usage(devices_of(engine, memory))
    dist.barrier()
    memory.reset_peak()
    before, times, fullest = memory.counters(), StepTimes(memory.device), memory.keep_fullest()
    graphs_before = compiling.graphs()
    usage.begin()
    with probe.listening(times):
        for _ in range(config.steps):
            times.mark_step()
            with fullest.step():
                step("timed")
        times.mark_step()
    step_seconds, phase_seconds = times.step_seconds(), times.phase_seconds()
    used, in_steps = usage.end(), memory.in_steps(before)
    graphs_in_timed_steps = compiling.graphs() - graphs_before
    memory.limit.lift()  # the run fits; what looks closer needs memory of its own

    trace = StepTrace(memory.device)
    with trace, probe.listening(trace):
        for _ in range(TRACED_STEPS):
            with probe.phase(STEP):
                step("traced")
    with profiling(engine, probe, memory, config.seed, layout) as profiled:
        step("profiled")
    if snapshot is not None:
        profiled.keep_snapshot(snapshot)
    return Measurements(
        losses=losses.tolist(),
        grad_norms=grad_norms.tolist(),
        step_seconds=step_seconds,
        phase_seconds=phase_seconds,
        memory=in_steps,
        used=used,
        first_gradients=first_gradients.found,
        first_moments=first_moments,
        last_parameters=statistics(engine, "parameters", config.seed, memory.device),
        last_masters=statistics(engine, "optimizer", config.seed, memory.device, "master"),
        graphs_in_timed_steps=graphs_in_timed_steps,
        traced=trace.split(),
        profiled=profiled.result(fullest.log),
    )


def devices_of(engine: Engine, memory: DeviceMemory) -> list[torch.device]:
    """What this process drives; a single device is its own, several are the machine's first."""
    if engine.devices == 1:
        return [memory.device]
    return [torch.device(memory.device.type, index) for index in range(engine.devices)]
