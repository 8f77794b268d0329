"""Gradients that are summed, averaged, scaled or clipped otherwise than they must be."""

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from harness.engines.deepspeed import initialize as deepspeed_initialize
from harness.engines.torch import (
    ddp,
    engine,
    grad_norm,
    loss_scaler,
)
from harness.probe import Probe
from harness.worker import main as worker_main
from tests.support.faults.rank import rank


def summed(run_dir: str) -> None:
    """Sum gradients over ranks instead of averaging them."""
    wrap = ddp.distributed_data_parallel

    def all_reduce_sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses other annotations than its own
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def spoiled(*arguments: Any) -> Any:
        def wrapped(model: Any) -> Any:
            module = wrap(*arguments)(model)
            module.register_comm_hook(None, all_reduce_sum)
            return module

        return wrapped

    ddp.distributed_data_parallel = spoiled
    worker_main.main(run_dir)


def halved(run_dir: str) -> None:
    """Halve the gradient of one small parameter."""
    ready = Probe.gradients_ready

    def spoiled(self: Probe, engine: Any) -> None:
        for piece in engine.local_shards("gradients"):
            if piece.name == "layers.1.input_layernorm.weight":
                piece.local.mul_(0.5)
        ready(self, engine)

    Probe.gradients_ready = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def norms_not_summed(run_dir: str) -> None:
    """Leave the gradients of norms as those of this rank's part of the sequence."""
    engine.reduce_partial_grad = unsummed
    worker_main.main(run_dir)


def unsummed(gradient: Any) -> Any:
    if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)
    return gradient


def positions_not_summed(run_dir: str) -> None:
    """Leave the gradients of learned positions as those of this rank's part of the sequence."""
    ordinary = grad_norm.reduce_partial_grad
    engine.reduce_partial_grad = lambda gradient: unsummed(gradient) if gradient.dim() == 2 else ordinary(gradient)
    worker_main.main(run_dir)


def norm_of_one_stage(run_dir: str) -> None:
    """Clip each stage by the norm of its own gradients."""
    totals = engine.TorchEngine.reduce_loss_and_norm

    def spoiled(self: Any, loss: Any, gradients: Any) -> Any:
        known, _ = totals(self, loss, gradients)
        return known, grad_norm.squared_grad_norm(gradients, gradients[0].device).sqrt()

    engine.TorchEngine.reduce_loss_and_norm = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def clipped_elsewhere(run_dir: str) -> None:
    """Leave out the clipping on rank 1."""
    if rank() == 1:
        engine.clip_gradients = lambda gradients, total, most: None
    worker_main.main(run_dir)


def scale_never_taken_out(run_dir: str) -> None:
    """Leave gradients in fp16 multiplied by the loss scale."""
    loss_scaler.LossScaler.unscale = lambda self, gradients: None  # type: ignore[method-assign]
    worker_main.main(run_dir)


def autotp_not_marked(run_dir: str) -> None:
    """Make DeepSpeed take sharded weights for copies, so that the global norm has those of one rank alone."""
    apply = deepspeed_initialize.apply_tensor_parallel

    def spoiled(model: Any, *arguments: Any) -> Any:
        names = apply(model, *arguments)
        for parameter in model.parameters():
            parameter.tensor_model_parallel = False
        return names

    deepspeed_initialize.apply_tensor_parallel = spoiled
    worker_main.main(run_dir)
