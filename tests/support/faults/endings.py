"""Runs that do not come to their end: out of memory, killed, stuck or crashed."""

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import harness.models.activation_checkpoint
import harness.models.build
import harness.models.decoder
import harness.models.init_weights
from harness.engines.torch import (
    engine,
)
from harness.records.run_folder import read_run_spec
from harness.worker import batches as rank_batches
from harness.worker import main as worker_main
from tests.support.faults.rank import rank
from tests.support.faults.training import nan_later


def exhausted(run_dir: str) -> None:
    """Ask for more memory than there is on rank 1, in its second step."""

    def spoiled(self: Any, step: int) -> Any:
        if rank() == 1 and step == 1:
            torch.empty(1 << 50, dtype=torch.uint8)
        return batches(self, step)

    batches = rank_batches.Batches.__call__
    rank_batches.Batches.__call__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def exhausted_in_a_stage(run_dir: str) -> None:
    """Ask for more memory than there is on rank 1, inside the model's forward."""
    forward = harness.models.decoder.Decoder.forward

    def spoiled(self: Any, hidden: Any, targets: Any = None) -> Any:
        if rank() == 1:
            torch.empty(1 << 50, dtype=torch.uint8)
        return forward(self, hidden, targets)

    harness.models.decoder.Decoder.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def killed(run_dir: str) -> None:
    """Kill rank 1 while it trains, as if from outside."""

    def spoiled(self: Any, step: int) -> Any:
        if rank() == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batches(self, step)

    batches = rank_batches.Batches.__call__
    rank_batches.Batches.__call__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def stuck(run_dir: str) -> None:
    """Keep rank 1 from ever taking part."""
    if rank() == 1:
        Path(run_dir, "stuck").touch()
        time.sleep(3600)
    worker_main.main(run_dir)


def stuck_in_a_step(run_dir: str) -> None:
    """Stop rank 1 in its second step."""
    step = engine.TorchEngine.step
    step_numbers = itertools.count()

    def waiting(self: Any, micro_batches: Any) -> Any:
        if rank() == 1 and next(step_numbers) == 1:
            time.sleep(3600)
        return step(self, micro_batches)

    engine.TorchEngine.step = waiting  # type: ignore[method-assign]
    worker_main.main(run_dir)


def stuck_everywhere(run_dir: str) -> None:
    """Stop every rank in its second step."""
    step = engine.TorchEngine.step
    step_numbers = itertools.count()

    def waiting(self: Any, micro_batches: Any) -> Any:
        if next(step_numbers) == 1:
            time.sleep(3600)
        return step(self, micro_batches)

    engine.TorchEngine.step = waiting  # type: ignore[method-assign]
    worker_main.main(run_dir)


def greedy(run_dir: str) -> None:
    """Touch more and more host memory in rank 1's second step, until the process is stopped."""
    step = engine.TorchEngine.step
    step_numbers, blocks = itertools.count(), []

    def hungry(self: Any, micro_batches: Any) -> Any:
        if rank() == 1 and next(step_numbers) == 1:
            while True:
                blocks.append(b"1" * 2**24)
        return step(self, micro_batches)

    engine.TorchEngine.step = hungry  # type: ignore[method-assign]
    worker_main.main(run_dir)


def collective_mismatched(run_dir: str) -> None:
    """Call another collective on rank 1 than on the other ranks, in the second step."""
    step = engine.TorchEngine.step
    step_numbers = itertools.count()

    def spoiled(self: Any, micro_batches: Any) -> Any:
        if next(step_numbers) == 1:
            dist.all_reduce(torch.zeros(8 if rank() == 1 else 2))
        return step(self, micro_batches)

    engine.TorchEngine.step = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def each_its_own(run_dir: str) -> None:
    """Make one run of a sweep hang, one run out of memory and one lose its loss to NaN; leave one as it is."""
    layout = read_run_spec(Path(run_dir)).layout
    faults = {(1, 2, 1): exhausted, (2, 1, 1): stuck_in_a_step, (1, 1, 2): nan_later}
    faults.get((layout.dp_shard, layout.dp_replicate, layout.tp), worker_main.main)(run_dir)
