"""Data parallelism without the harness, as an experienced engineer would write it for torchrun: no probe, no checks.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.benchmarks.bare_ddp FOLDER

FOLDER holds the run.json of the same training; model, initial values and batches are the harness's own, so that both
train the same. The first rank prints a line when it is warm, and one line of JSON at the end: losses are means over
ranks, and a step's seconds are those of the slowest rank.
"""

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from harness.models.build import build_model
from harness.models.init_weights import materialize
from harness.records.run_folder import read_run_spec
from harness.worker.batches import Batches


def main(folder: str) -> None:
    spec = read_run_spec(Path(folder))
    config, train, device = spec.config, spec.config.train, torch.device("cpu")
    dist.init_process_group("gloo")
    model = build_model(config.model)
    materialize(model, config.model, train.seed, device, torch.float32)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        replica.parameters(),
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=True,
    )
    batches = Batches(spec.corpus, config, spec.layout, dist.get_rank(), device)

    def step(index: int) -> Tensor:
        micro_batches = batches(index)
        total = torch.zeros(())
        for micro_batch in micro_batches:
            is_last = micro_batch is micro_batches[-1]
            with nullcontext() if is_last else replica.no_sync():
                logits = replica(micro_batch.inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), micro_batch.targets.flatten()) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        if train.gradient_clipping:
            clip_grad_norm_(replica.parameters(), train.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    losses = [step(index) for index in range(train.warmup_steps)]
    dist.barrier()
    if dist.get_rank() == 0:
        print("warm", flush=True)
    moments = [time.perf_counter()]
    for index in range(train.warmup_steps, train.warmup_steps + train.steps):
        losses.append(step(index))
        moments.append(time.perf_counter())

    mean_losses, seconds = torch.stack(losses), torch.tensor(moments, dtype=torch.float64).diff()
    dist.all_reduce(mean_losses)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    mean_losses /= dist.get_world_size()
    if dist.get_rank() == 0:
        result = {
            "step_seconds": statistics.median(seconds.tolist()),
            "seconds": seconds.tolist(),
            "losses": mean_losses.tolist(),
        }
        print(json.dumps(result), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
    dist.destroy_process_group()  # when the model is gone: a DistributedDataParallel that outlives it can hang
    # gloo's threads may still let go of tensors, which aborts a process whose interpreter ends (pytorch PR 179291).
    os._exit(0)
