"""Runs that do not come to their end: out of memory, killed, stuck or crashed; and delays, which are no faults."""

import gc
import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.records.run_folder import read_run_spec
from harness.worker import main as worker_main
from tests.support.plant import rank, replaces

BATCHES = "harness.worker.batches.Batches.__call__"  # called at the start of every step, with the step's number


@replaces(BATCHES, of_rank=1)
def exhausted(ordinary: Any, self: Any, step: int) -> Any:
    """Ask for more memory than there is on rank 1, in its second step."""
    if step == 1:
        torch.empty(1 << 50, dtype=torch.uint8)
    return ordinary(self, step)


@replaces("harness.models.decoder.Decoder.forward", of_rank=1)
def exhausted_in_a_stage(*_: Any, **__: Any) -> None:
    """Ask for more memory than there is on rank 1, inside the model's forward."""
    torch.empty(1 << 50, dtype=torch.uint8)


@replaces(BATCHES, of_rank=1)
def killed(ordinary: Any, self: Any, step: int) -> Any:
    """Kill rank 1 while it trains, as if from outside."""
    if step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ordinary(self, step)


def killed_once(run_dir: str) -> None:
    """Kill rank 1 while it trains, in the first of several attempts."""
    row = json.loads((Path(run_dir) / "record.json").read_text())["row"]
    (killed if row.get("attempts", 1) == 1 else worker_main.main)(run_dir)


def stuck(run_dir: str) -> None:
    """Keep rank 1 from ever taking part."""
    if rank() == 1:
        time.sleep(3600)
    worker_main.main(run_dir)


@replaces(BATCHES)
def leaking(ordinary: Any, self: Any, step: int) -> Any:
    """Fail in the second step with an error that quotes an address with a token, as libraries do, and print it."""
    if step == 1:
        address = f"https://{'hf_aB3dE5gH7j' * 3}@host"
        print("refused by", address)
        raise RuntimeError(f"401 from {address}")
    return ordinary(self, step)


@replaces(BATCHES, of_rank=1)
def stuck_in_a_step(ordinary: Any, self: Any, step: int) -> Any:
    """Stop rank 1 in its second step."""
    time.sleep(3600 if step == 1 else 0)
    return ordinary(self, step)


@replaces(BATCHES)
def stuck_everywhere(ordinary: Any, self: Any, step: int) -> Any:
    """Stop every rank in its second step."""
    time.sleep(3600 if step == 1 else 0)
    return ordinary(self, step)


@replaces(BATCHES, of_rank=1)
def greedy(ordinary: Any, self: Any, step: int) -> Any:
    """Touch more and more host memory in rank 1's second step, until the process is stopped."""
    blocks = []
    while step == 1:
        blocks.append(b"1" * 2**24)
    return ordinary(self, step)


@replaces(BATCHES)
def collective_mismatched(ordinary: Any, self: Any, step: int) -> Any:
    """Call another collective on rank 1 than on the other ranks, in the second step."""
    if step == 1:
        dist.all_reduce(torch.zeros(8 if rank() == 1 else 2))
    return ordinary(self, step)


step_numbers = itertools.count()


@replaces("harness.engines.torch.engine.TorchEngine.step")
def nan_later(ordinary: Any, *arguments: Any) -> Any:
    """Make the loss NaN from the third step on."""
    result = ordinary(*arguments)
    return result._replace(loss=result.loss * float("nan")) if next(step_numbers) >= 2 else result


def each_its_own(run_dir: str) -> None:
    """Make one run of a sweep hang, one run out of memory and one lose its loss to NaN; leave one as it is."""
    layout = read_run_spec(Path(run_dir)).layout
    faults = {(1, 2, 1): exhausted, (2, 1, 1): stuck_in_a_step, (1, 1, 2): nan_later}
    faults.get((layout.dp_shard, layout.dp_replicate, layout.tp), worker_main.main)(run_dir)


# --- delays of known length

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


LOST = "torch's profiler recorded 1 of the 9 kernels that were launched"


@replaces("harness.measure.step_trace.StepTrace.report")
def lost_kernels(report: Any, self: Any) -> Any:
    """Report that the profiler dropped most kernels."""
    return report(self) | {"time_breakdown": None, "trace_problem": LOST}


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


BUILD_SECONDS, FIRST_STEP_SECONDS, FINGERPRINT_SECONDS = 0.8, 1.6, 3.2


@replaces(
    "harness.worker.main.load_engine",
    "harness.engines.torch.engine.TorchEngine.step",
    "harness.measure.gradient_fingerprint.Fingerprinter.state",
)
def slow_start(ordinary: Any, *arguments: Any) -> Any:
    """Delay each part of a start for as long as no other, whenever it runs; this is not a fault."""
    delays = {"load_engine": BUILD_SECONDS, "step": FIRST_STEP_SECONDS, "state": FINGERPRINT_SECONDS}
    time.sleep(delays[ordinary.__name__])
    return ordinary(*arguments)
