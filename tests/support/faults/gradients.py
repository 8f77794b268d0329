"""Gradients that are summed, averaged, scaled or clipped otherwise than they must be."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from harness.engines.deepspeed import initialize as deepspeed_initialize
from harness.engines.deepspeed.engine import DeepSpeedTrainEngine
from harness.engines.torch import (
    ddp,
    engine,
    grad_norm,
    loss_scaler,
)
from harness.probe import Probe
from harness.records.run_folder import read_run_spec
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


SCALED_MATRIX = "layers.1.mlp.up_proj.weight"


def scale_by_precision(run_dir: str) -> float:
    """Return the smallest scale that the proof must not miss: 1.01 in fp32, and 1.1 in 16 bits."""
    return 1.01 if read_run_spec(Path(run_dir)).config.precision.compute == "float32" else 1.1


def gradient_scaled(run_dir: str, matrix: str = SCALED_MATRIX) -> None:
    """Scale the gradient of one matrix a little."""
    ready, scale = Probe.gradients_ready, scale_by_precision(run_dir)

    def spoiled(self: Probe, engine: Any) -> None:
        for piece in engine.local_shards("gradients"):
            if piece.name == matrix:
                piece.local.mul_(scale)
        ready(self, engine)

    Probe.gradients_ready = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def embedding_gradient_scaled(run_dir: str) -> None:
    """Scale the gradient of the embedding a little: it has one summand for every token."""
    gradient_scaled(run_dir, "embed_tokens.weight")


def update_scaled(run_dir: str) -> None:
    """Scale the update of one matrix a little."""
    scale = scale_by_precision(run_dir)

    def updated_shards(engine: Any) -> list[Any]:
        pieces = [piece for piece in engine.local_shards("optimizer") if piece.state_name == "master"]
        pieces = pieces or list(engine.local_shards("parameters"))
        return [piece.local.detach() for piece in pieces if piece.name == SCALED_MATRIX]

    def spoil(step: Any) -> Any:
        def spoiled(self: Any, micro_batches: Any) -> Any:
            before = [piece.clone() for piece in updated_shards(self)]
            result = step(self, micro_batches)
            for piece, old in zip(updated_shards(self), before, strict=True):
                piece.copy_(old + scale * (piece - old))
            return result

        return spoiled

    engine.TorchEngine.step = spoil(engine.TorchEngine.step)  # type: ignore[method-assign]
    DeepSpeedTrainEngine.step = spoil(DeepSpeedTrainEngine.step)  # type: ignore[method-assign]
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
