"""Delays of known length, which are no faults."""

import gc
import time
from typing import Any

from tests.support.faults.plant import rank, replaces

SLOW_SECONDS = 0.05  # for every forward of the last stage

SLOW_TRACER_SECONDS = 2.0  # for the beginning of rank 1's trace

SLOW_RANK_SECONDS = 0.15  # for every forward of rank 1: much longer than a busy kernel's time slices


@replaces("harness.models.decoder.Decoder.forward")
def slow_last_stage(ordinary: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    """Delay every forward of the last stage, so that the other stages wait for it; this is not a fault."""
    time.sleep(SLOW_SECONDS if self.lm_head is not None else 0)
    return ordinary(self, *arguments, **keywords)


@replaces("harness.engines.torch.engine.TorchEngine.step")
def slow_steps(ordinary: Any, *arguments: Any) -> Any:
    """Delay every step by more than a second; this is not a fault."""
    time.sleep(1.2)
    return ordinary(*arguments)


@replaces("harness.models.decoder.Decoder.forward", of_rank=1)
def slow_rank(ordinary: Any, *arguments: Any, **keywords: Any) -> Any:
    """Delay every forward on rank 1; this is not a fault."""
    time.sleep(SLOW_RANK_SECONDS)
    return ordinary(*arguments, **keywords)


@replaces("harness.measure.step_timer.StepTimes.mark_step")
def much_garbage(ordinary: Any, self: Any) -> None:
    """Make garbage at the start of every timed step, which must not be collected there; this is not a fault."""
    ordinary(self)
    collections = gc.get_stats()
    for _ in range(5000):
        cycle: list[Any] = []
        cycle.append(cycle)
    if gc.get_stats() != collections:
        raise RuntimeError("garbage was collected in a timed step")


TRACING = ["warm_up", "profile_step", "__enter__"]  # what a trace needs, in order

calls: list[str] = []


@replaces(
    "harness.measure.step_trace.StepTrace.warm_up",
    "harness.worker.train_loop.profile_step",
    "harness.measure.step_trace.StepTrace.__enter__",
)
def slow_to_trace(ordinary: Any, *arguments: Any) -> Any:
    """Attach rank 1's tracer late, after it was warmed up before the profiled step; this is not a fault."""
    calls.append(ordinary.__name__)
    if calls != TRACING[: len(calls)]:
        raise RuntimeError(f"the traced steps were prepared by {calls}")
    result = ordinary(*arguments)
    time.sleep(SLOW_TRACER_SECONDS if rank() == 1 and calls == TRACING else 0)
    return result
