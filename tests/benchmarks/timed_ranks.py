"""What ranks run in the benchmark of explaining: the harness with the moments of its phases, or the training alone.

Both write their moments to a file in the run's folder. A moment is a phase, the number of its step, the seconds of a
clock, and the processor time of all threads of the rank.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from harness.engines.base import load_engine
from harness.measure.kernels import attention_backend_priority, prefers_cudnn
from harness.models.dropout_rng import dropout_seed
from harness.probe import Probe
from harness.records.heartbeat import HeartbeatWriter
from harness.records.run_folder import read_run_spec
from harness.worker import main as worker_main
from harness.worker.batches import Batches
from harness.worker.process_group import process_group, wait_for_ranks

Moments = list[tuple[str, int, float, float]]


def train_with_harness(run_dir: str) -> None:
    """Run a rank as the harness does, and write the moment of every heartbeat and of its end."""
    moments: Moments = []
    announce = HeartbeatWriter.__call__

    def timed(self: HeartbeatWriter, phase: str, step: int = 0) -> None:
        moments.append(moment(phase, step))
        announce(self, phase, step)

    HeartbeatWriter.__call__ = timed  # type: ignore[method-assign]
    worker_main.main(run_dir)
    write_moments(run_dir, [*moments, moment("end")])


def train_alone(run_dir: str) -> None:
    """Train the warm-up and timed steps of a run with its engine and data, and nothing else."""
    import torch

    spec = read_run_spec(Path(run_dir))
    moments: Moments = []
    with process_group(spec) as (mesh, device), attention_backend_priority(prefers_cudnn(device)):
        rank, config = int(os.environ["RANK"]), spec.config
        engine = load_engine(spec.layout.engine).build(config, spec.layout, mesh, device, Probe())
        torch.manual_seed(dropout_seed(config.train.seed, spec.layout, rank))
        batches = Batches(spec.corpus, config, spec.layout, rank, device)
        for index in range(config.train.warmup_steps + config.train.steps):
            if index == config.train.warmup_steps:
                wait_for_ranks(device)
            moments.append(moment("warm-up" if index < config.train.warmup_steps else "timed", index))
            engine.step(batches(index))
        moments.append(moment("finishing"))
        engine.close()
        del engine
    write_moments(run_dir, [*moments, moment("end")])


def moment(phase: str, step: int = 0) -> tuple[str, int, float, float]:
    return phase, step, time.perf_counter(), time.process_time()


def write_moments(run_dir: str, moments: Moments) -> None:
    moments_file(Path(run_dir), int(os.environ["RANK"])).write_text(json.dumps(moments))


def read_moments(run_dir: Path, ranks: int) -> list[list[Any]]:
    """Return the moments of every rank from its first step on."""
    of_ranks = [json.loads(moments_file(run_dir, rank).read_text()) for rank in range(ranks)]
    return [[entry for entry in moments if entry[0] not in ("joining", "building")] for moments in of_ranks]


def moments_file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"moments.{rank}.json"
