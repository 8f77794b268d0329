"""The one training loop: warm-up, timed, profiled and traced steps. It does not depend on the strategy."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.config.schema import TRACED_STEPS, RunConfig
from harness.engines.base import Batch, Engine, StepResult
from harness.layout.layout import Layout
from harness.measure.allocation_logger import PeakStepLog
from harness.measure.gradient_fingerprint import CHUNK_ELEMENTS, Fingerprinter, GradientFingerprints
from harness.measure.host_usage import HostUsageMeter
from harness.measure.memory import DeviceMemory
from harness.measure.optimizer_steps import Updates, first_update_excess
from harness.measure.step_profiler import profile_step
from harness.measure.step_timer import StepTimes, garbage_collection_disabled
from harness.measure.step_trace import StepTrace
from harness.measure.time_breakdown import STEP_PHASE
from harness.models.build import compile_seconds, compiled_graph_count
from harness.probe import Probe
from harness.records.evidence import StartUp, UpdateExcess, UpdateReport
from harness.records.rank_report import RankReport, TensorFingerprint
from harness.tensors.storage import plain_values
from harness.worker.process_group import wait_for_device, wait_for_ranks

PROFILE_ATTEMPTS = 8  # each with half the loss scale, if gradients overflow in the profiled step


@garbage_collection_disabled()
def train(
    report: RankReport,
    engine: Engine,
    probe: Probe,
    batches: Callable[[int], Sequence[Batch]],
    run: RunConfig,
    layout: Layout,
    memory: DeviceMemory,
    trace: StepTrace,
    progress: Callable[[str, int], None],
    snapshot: Path | None = None,
) -> RankReport:
    """Train all steps of the configuration and return the report with the measurements.

    A memory snapshot of the profiled step is written to `snapshot`. Raise FloatingPointError if gradients overflow in
    every warm-up step.
    """
    config = run.train
    results = StepResults(config.total_steps, memory.device)

    def step(phase: str, index: int) -> None:
        progress(phase, index)
        with probe.phase("data"):
            micro_batches = batches(index)
        results.keep(index, engine.step(micro_batches))

    fingerprinter = Fingerprinter(run.model, config.seed, memory.device)
    first_update = FirstUpdate(engine, probe, fingerprinter, memory, run)
    for index in range(config.warmup_steps):
        with first_update.watch(index):
            step("warm-up", index)
            if index == 0:
                start_up = first_update.start_up()
    if first_update.moments is None:
        raise FloatingPointError(
            "gradients overflowed in every warm-up step: precision.initial_loss_scale is too large"
        )

    usage = HostUsageMeter(driven_devices(engine, memory))
    wait_for_ranks(memory.device)
    memory.reset_peak()
    times = StepTimes(memory.device)
    peak_step = PeakStepLog(memory.allocator)  # which logs nothing on CUDA, where that would slow the steps
    graphs_before = compiled_graph_count()
    usage.begin()
    with probe.listen(times):
        for index in range(config.steps):
            times.mark_step()
            with peak_step.step():
                step("timed", config.warmup_steps + index)
        times.mark_step()
    step_seconds, phase_seconds = times.step_seconds(), times.phase_seconds()
    host_usage, counters = usage.end(), memory.counters()
    graphs_in_timed_steps = compiled_graph_count() - graphs_before
    memory.disable_limit()  # the run fits, and the closer measurements need memory of their own

    trace.warm_up()  # before the profiled step, which is not timed
    for _ in range(PROFILE_ATTEMPTS):
        skipped_steps = engine.skipped_steps
        with profile_step(engine, probe, memory, fingerprinter, layout, progress, config.profiled_step) as profiled:
            step("profiled", config.profiled_step)
        if engine.skipped_steps == skipped_steps:  # else gradients overflowed, and the optimizer did not run
            break
    if snapshot is not None:
        profiled.recorder.write_snapshot(snapshot)
    with trace:
        wait_for_ranks(memory.device)  # a rank that is late would look like communication in the others' traces
        with probe.listen(trace):
            for index in range(config.total_steps - TRACED_STEPS, config.total_steps):
                with probe.phase(STEP_PHASE):
                    step("traced", index)
    return dataclasses.replace(
        report,
        **results.report(),
        start_up=start_up,
        step_seconds=step_seconds,
        phase_seconds=phase_seconds,
        host_usage=host_usage,
        after_last_update=first_update.updates.report(),
        last_parameters=fingerprinter.state(engine, "parameters"),
        last_masters=fingerprinter.state(engine, "optimizer", ("master",)),
        graphs_in_timed_steps=graphs_in_timed_steps,
        **first_update.report(),
        **trace.report(),
        profiled=profiled.result(peak_step.log),
        expert_tokens=profiled.routing(),
        last_gradients=profiled.gradient_fingerprints.fingerprints,
        **counters._asdict(),
    )


def driven_devices(engine: Engine, memory: DeviceMemory) -> list[torch.device]:
    """Return the devices that this process drives: its own, or the machine's first ones if there are several."""
    if engine.devices == 1:
        return [memory.device]
    return [torch.device(memory.device.type, index) for index in range(engine.devices)]


class StepResults:
    """The losses, global norms and squared gradients of all steps, which the first step allocates for all others.

    Every step then needs the same memory. Squares are copied to the host, and there outside of torch's allocator.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.losses, self.grad_norms = torch.zeros(2, steps, device=device)
        self.squares: torch.Tensor | None = None

    @torch.no_grad()
    def keep(self, index: int, result: StepResult) -> None:
        """Keep the result of step number `index`, without waiting for it on a GPU."""
        self.losses[index], self.grad_norms[index] = result.loss, result.grad_norm
        if result.squares is None:
            return
        if self.squares is None:
            squares = torch.from_numpy(np.zeros((len(self.losses), len(result.squares))))
            self.squares = squares.pin_memory() if result.squares.is_cuda else squares
        self.squares[index].copy_(result.squares, non_blocking=True)

    def report(self) -> dict[str, Any]:
        """Return the fields of a rank's report, once the device has passed the last step."""
        losses, grad_norms = self.losses.tolist(), self.grad_norms.tolist()  # which waits for the device
        squares = () if self.squares is None else self.squares.tolist()
        return {"losses": losses, "grad_norms": grad_norms, "gradient_squares": squares}


class FirstUpdate:
    """The fingerprints of the first step that updates: gradients, first moments, and the changes of parameters.

    Under loss scaling, steps before it are skipped because gradients overflow.
    """

    def __init__(
        self, engine: Engine, probe: Probe, fingerprinter: Fingerprinter, memory: DeviceMemory, run: RunConfig
    ) -> None:
        self.engine = engine
        self.probe = probe
        self.fingerprinter = fingerprinter
        self.memory = memory
        self.run = run
        self.listener = GradientFingerprints(fingerprinter, self.outside_of_step)
        self.began = time.monotonic()
        self.own_seconds = 0.0  # that the listener took
        self.updates = Updates(run.optimizer.spec)
        self.rules = {rule.gradient_state: rule for rule in run.optimizer.spec.rules}
        self.after_first = UpdateReport()
        self.moments: Sequence[TensorFingerprint] | None = None  # of clipped gradients
        self.changes: list[TensorFingerprint] = []
        self.excess = UpdateExcess()

    def report(self) -> dict[str, Any]:
        """Return the fields of a rank's report; gradients are those before clipping."""
        return {
            "first_gradients": self.listener.fingerprints,
            "first_moments": self.moments or (),
            "first_updates": self.changes,
            "after_first_update": self.after_first,
            "worst_first_update": self.excess,
        }

    def start_up(self) -> StartUp:
        """Return what the first step took, right behind it."""
        wait_for_device(self.memory.device)
        seconds = time.monotonic() - self.began - self.own_seconds
        return StartUp(first_step_seconds=seconds, compile_seconds=compile_seconds())

    @contextmanager
    def outside_of_step(self) -> Iterator[None]:
        """Count neither the memory nor the time of what the harness does inside this context as the step's."""
        wait_for_device(self.memory.device)
        began = time.monotonic()
        with self.memory.limit_suspended():
            yield
        self.own_seconds += time.monotonic() - began

    @contextmanager
    def watch(self, index: int) -> Iterator[None]:
        """Watch step number `index`, if no step before it has updated."""
        if self.moments is not None:
            yield
            return
        with self.probe.listen(self.listener), self.updates.watch():
            yield
        if self.engine.skipped_steps > index:  # gradients overflowed, and a smaller loss scale is next
            return
        self.after_first = self.updates.report()
        with self.memory.limit_suspended():
            self.moments = self.fingerprinter.state(self.engine, "optimizer", self.rules)
            self._compare_with_initial()
        self.memory.empty_cache()  # the fingerprints needed this memory

    @torch.no_grad()
    def _compare_with_initial(self) -> None:
        """Fingerprint the changes, and compare those of fp32 with what the optimizer's first moments make of them."""
        shards = (shard for shard in self.engine.local_shards("optimizer") if shard.state_name in self.rules)
        moments = {(shard.name, shard.box): shard for shard in shards}
        for shard, initial in self.fingerprinter.changed(self.engine):
            self.changes.append(self.fingerprinter.fingerprint(shard, self.fingerprinter.shape(shard), initial))
            moment = moments.get((shard.name, shard.box))  # of replicated parameters, some rank has it
            if shard.local.dtype == torch.float32 and moment is not None and self.rules[moment.state_name].formula:
                chunk, rule = CHUNK_ELEMENTS[initial.device.type], self.rules[moment.state_name]
                values = plain_values(moment.local)
                excess = first_update_excess(initial, shard.local, values, rule, self.run.train, chunk)
                self.excess = max(self.excess, UpdateExcess(shard.name, excess), key=lambda entry: entry.excess)
