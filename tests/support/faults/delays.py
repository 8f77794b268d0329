"""Delays of known length, which are no faults."""

import gc
import time
from pathlib import Path
from typing import Any

import harness.models.activation_checkpoint
import harness.models.build
import harness.models.decoder
import harness.models.init_weights
from harness.engines.torch import (
    engine,
)
from harness.measure.step_timer import StepTimes
from harness.measure.step_trace import StepTrace
from harness.records.run_folder import read_run_spec
from harness.worker import main as worker_main
from harness.worker import train_loop
from tests.support.faults.rank import rank

SLOW_SECONDS = 0.05  # for every forward of the last stage

SLOW_TRACER_SECONDS = 2.0  # for the beginning of rank 1's trace

SLOW_RANK_SECONDS = 0.15  # for every forward of rank 1: much longer than a busy kernel's time slices


def slow_last_stage(run_dir: str) -> None:
    """Delay every forward of the last stage, so that the other stages wait for it; this is not a fault."""
    forward = harness.models.decoder.Decoder.forward

    def spoiled(self: Any, hidden: Any, targets: Any = None) -> Any:
        time.sleep(SLOW_SECONDS if self.lm_head is not None else 0)
        return forward(self, hidden, targets)

    harness.models.decoder.Decoder.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def slow_steps(run_dir: str) -> None:
    """Delay every step by more than a second; this is not a fault."""
    step = engine.TorchEngine.step

    def spoiled(self: Any, micro_batches: Any) -> Any:
        time.sleep(1.2)
        return step(self, micro_batches)

    engine.TorchEngine.step = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def much_garbage(run_dir: str) -> None:
    """Make garbage in every forward, and log each collection during the timed steps; this is not a fault."""
    forward, mark_step, marks = harness.models.decoder.Decoder.forward, StepTimes.mark_step, [0]
    steps = read_run_spec(Path(run_dir)).config.train.steps

    def spoiled(self: Any, hidden: Any, targets: Any = None) -> Any:
        for _ in range(5000):
            cycle: list[Any] = []
            cycle.append(cycle)
        return forward(self, hidden, targets)

    def counted(self: StepTimes) -> None:
        marks[0] += 1
        mark_step(self)

    def log_collection(phase: str, _: dict[str, int]) -> None:
        if phase == "start" and 0 < marks[0] <= steps:
            with (Path(run_dir) / "collections").open("a") as log:
                log.write("one\n")

    harness.models.decoder.Decoder.forward = spoiled  # type: ignore[method-assign]
    StepTimes.mark_step = counted  # type: ignore[method-assign]
    gc.callbacks.append(log_collection)
    worker_main.main(run_dir)


def slow_rank(run_dir: str) -> None:
    """Delay every forward on rank 1; this is not a fault."""
    forward = harness.models.decoder.Decoder.forward

    def spoiled(self: Any, hidden: Any, targets: Any = None) -> Any:
        time.sleep(SLOW_RANK_SECONDS if rank() == 1 else 0)
        return forward(self, hidden, targets)

    harness.models.decoder.Decoder.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def slow_to_trace(run_dir: str) -> None:
    """Attach rank 1's tracer late, after it was warmed up before the profiled step; this is not a fault."""
    warm_up, enter, profile_step = StepTrace.warm_up, StepTrace.__enter__, train_loop.profile_step
    done: list[str] = []

    def warmed_up(self: StepTrace) -> None:
        done.append("warm-up")
        warm_up(self)

    def profiled(*arguments: Any) -> Any:
        done.append("profiled step")
        return profile_step(*arguments)

    def entered(self: StepTrace) -> StepTrace:
        if done != ["warm-up", "profiled step"]:
            raise RuntimeError(f"before the traced steps came {done}")
        trace = enter(self)
        time.sleep(SLOW_TRACER_SECONDS if rank() == 1 else 0)
        return trace

    StepTrace.warm_up, StepTrace.__enter__ = warmed_up, entered  # type: ignore[method-assign]
    train_loop.profile_step = profiled  # type: ignore[attr-defined]
    worker_main.main(run_dir)
