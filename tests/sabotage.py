"""Faults planted in ranks: each entry spoils one thing and then runs the worker as it is.

Every rank is a process of its own, so what is patched here is gone with it.
"""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import harness.checkpointing
import harness.model
from harness import worker
from harness.engines import torch as torch_engine
from harness.engines.deepspeed import start as deepspeed_start
from harness.engines.torch import replicate
from harness.measure.communication import CommunicationCounter
from harness.measure.probe import Probe


def rank() -> int:
    return int(os.environ["RANK"])


def sharding_dropped(run_dir: str) -> None:
    """The strategy runs as plain DDP: trains right, holds everything."""
    build = torch_engine.build

    def plain(config: Any, layout: Any, mesh: Any, device: Any, probe: Any) -> Any:
        mesh = mesh["dp_shard"]
        mesh.get_group = lambda axis: dist.group.WORLD
        whole = dataclasses.replace(layout, data_parallel="ddp", zero_stage=0, dp_replicate=layout.dp_shard, dp_shard=1)
        return build(config, whole, mesh, device, probe)

    torch_engine.build = plain
    worker.main(run_dir)


def lower_stage(run_dir: str) -> None:
    """ZeRO-2 runs as ZeRO-1: synchronises once a step instead of every micro-batch."""
    settings = deepspeed_start.settings

    def spoiled(config: Any, layout: Any) -> Any:
        chosen = settings(config, layout)
        chosen["zero_optimization"]["stage"] = 1
        return chosen

    deepspeed_start.settings = spoiled
    worker.main(run_dir)


def other_data(run_dir: str) -> None:
    """Rank 1 trains on rank 0's sequences."""
    init = worker.Batches.__init__

    def spoiled(self: Any, corpus: Any, config: Any, layout: Any, data_rank: int, device: Any) -> None:
        init(self, corpus, config, layout, 0, device)

    worker.Batches.__init__ = spoiled  # type: ignore[method-assign]
    worker.main(run_dir)


def summed(run_dir: str) -> None:
    """Gradients are summed over ranks, not averaged."""
    wrap = replicate.distributed_data_parallel

    def all_reduce_sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses other annotations than its own
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def spoiled(*arguments: Any) -> Any:
        def wrapped(model: Any) -> Any:
            module = wrap(*arguments)(model)
            module.register_comm_hook(None, all_reduce_sum)
            return module

        return wrapped

    replicate.distributed_data_parallel = spoiled
    worker.main(run_dir)


def halved(run_dir: str) -> None:
    """One small parameter gets half its gradient."""
    ready = Probe.gradients_ready

    def spoiled(self: Probe, engine: Any) -> None:
        for piece in engine.pieces("gradients"):
            if piece.name == "layers.1.input_layernorm.weight":
                piece.local.mul_(0.5)
        ready(self, engine)

    Probe.gradients_ready = spoiled  # type: ignore[method-assign]
    worker.main(run_dir)


def unsynchronised(run_dir: str) -> None:
    """Copies never exchange their gradients."""
    micro_batch = replicate.Replicate.micro_batch
    replicate.Replicate.micro_batch = lambda self, last: micro_batch(self, last=False)  # type: ignore[assignment]
    worker.main(run_dir)


def uncounted(run_dir: str) -> None:
    """The counter misses one kind of operation."""
    count = CommunicationCounter._count

    def spoiled(self: Any, func: Any, args: Any, kwargs: Any) -> None:
        if "reduce_scatter" not in func._schema.name:
            count(self, func, args, kwargs)

    CommunicationCounter._count = spoiled  # type: ignore[method-assign]
    worker.main(run_dir)


def never_recomputed(run_dir: str) -> None:
    """Checkpointing is left out."""
    harness.checkpointing.apply_checkpointing = lambda model, checkpointing, probe: None
    worker.main(run_dir)


def other_optimizer(run_dir: str) -> None:
    """Plain SGD in place of AdamW."""
    torch.optim.AdamW = lambda parameters, lr, **_: torch.optim.SGD(parameters, lr=lr)  # type: ignore[assignment,misc]
    worker.main(run_dir)


def not_finite(run_dir: str) -> None:
    """The loss is not a number from the start."""
    loss_function = harness.model.loss_function
    harness.model.loss_function = lambda logits, targets: loss_function(logits, targets) * float("nan")
    worker.main(run_dir)


def exhausted(run_dir: str) -> None:
    """Rank 1 asks for more memory than there is, in its second step."""

    def spoiled(self: Any, step: int) -> Any:
        if rank() == 1 and step == 1:
            torch.empty(1 << 50, dtype=torch.uint8)
        return batches(self, step)

    batches = worker.Batches.__call__
    worker.Batches.__call__ = spoiled  # type: ignore[method-assign]
    worker.main(run_dir)


def killed(run_dir: str) -> None:
    """Rank 1 is killed from outside while it trains."""

    def spoiled(self: Any, step: int) -> Any:
        if rank() == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batches(self, step)

    batches = worker.Batches.__call__
    worker.Batches.__call__ = spoiled  # type: ignore[method-assign]
    worker.main(run_dir)


def stuck(run_dir: str) -> None:
    """Rank 1 never takes part."""
    if rank() == 1:
        Path(run_dir, "stuck").touch()
        signal.pause()
    worker.main(run_dir)
