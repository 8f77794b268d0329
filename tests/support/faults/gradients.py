"""Gradients that are summed, averaged, scaled or clipped otherwise than they must be."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from harness.engines.torch import grad_norm
from harness.records.run_folder import read_run_spec
from harness.worker import main as worker_main
from tests.support.faults.plant import plant, replaces

ENGINE = "harness.engines.torch.engine"


@replaces("harness.engines.torch.ddp.distributed_data_parallel")
def summed(ordinary: Any, *arguments: Any) -> Callable[[Any], Any]:
    """Sum gradients over ranks instead of averaging them."""

    def all_reduce_sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses other annotations than its own
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def wrapped(model: Any) -> Any:
        module = ordinary(*arguments)(model)
        module.register_comm_hook(None, all_reduce_sum)
        return module

    return wrapped


GRADIENTS_READY = "harness.probe.Probe.gradients_ready"


def scale_gradient(name: str, scale: float, ordinary: Any, probe: Any, engine: Any) -> None:
    for piece in engine.local_shards("gradients"):
        if piece.name == name:
            piece.local.mul_(scale)
    ordinary(probe, engine)


@replaces(GRADIENTS_READY)
def halved(*arguments: Any) -> None:
    """Halve the gradient of one small parameter."""
    scale_gradient("layers.1.input_layernorm.weight", 0.5, *arguments)


SCALED_MATRIX = "layers.1.mlp.up_proj.weight"


def scale_by_precision(run_dir: str) -> float:
    """Return the smallest scale that the proof must not miss: 1.01 in fp32, and 1.1 in 16 bits."""
    return 1.01 if read_run_spec(Path(run_dir)).config.precision.compute == "float32" else 1.1


def gradient_scaled(run_dir: str, matrix: str = SCALED_MATRIX) -> None:
    """Scale the gradient of one matrix a little."""
    plant(functools.partial(scale_gradient, matrix, scale_by_precision(run_dir)), GRADIENTS_READY)
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

    def spoiled(ordinary: Any, engine: Any, micro_batches: Any) -> Any:
        before = [piece.clone() for piece in updated_shards(engine)]
        result = ordinary(engine, micro_batches)
        for piece, old in zip(updated_shards(engine), before, strict=True):
            piece.copy_(old + scale * (piece - old))
        return result

    plant(spoiled, f"{ENGINE}.TorchEngine.step", "harness.engines.deepspeed.engine.DeepSpeedTrainEngine.step")
    worker_main.main(run_dir)


@replaces(f"{ENGINE}.reduce_partial_grad")
def norms_not_summed(_: Any, gradient: Any) -> Any:
    """Leave the gradients of norms as those of this rank's part of the sequence."""
    return unsummed(gradient)


@replaces(f"{ENGINE}.reduce_partial_grad")
def positions_not_summed(ordinary: Any, gradient: Any) -> Any:
    """Leave the gradients of learned positions as those of this rank's part of the sequence."""
    return unsummed(gradient) if gradient.dim() == 2 else ordinary(gradient)


def unsummed(gradient: Any) -> Any:
    if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)
    return gradient


@replaces(f"{ENGINE}.TorchEngine.reduce_loss_and_norm")
def norm_of_one_stage(ordinary: Any, self: Any, loss: Any, gradients: Any) -> Any:
    """Clip each stage by the norm of its own gradients."""
    known, _ = ordinary(self, loss, gradients)
    return known, grad_norm.squared_grad_norm(gradients, gradients[0].device).sqrt()


@replaces(f"{ENGINE}.clip_gradients", of_rank=1)
def clipped_elsewhere(*_: Any) -> None:
    """Leave out the clipping on rank 1."""


@replaces("harness.engines.torch.loss_scaler.LossScaler.unscale")
def scale_never_taken_out(*_: Any) -> None:
    """Leave gradients in fp16 multiplied by the loss scale."""


@replaces("harness.engines.deepspeed.initialize.apply_tensor_parallel")
def autotp_not_marked(ordinary: Any, model: Any, *arguments: Any) -> Any:
    """Make DeepSpeed take sharded weights for copies, so that the global norm has those of one rank alone."""
    names = ordinary(model, *arguments)
    for parameter in model.parameters():
        parameter.tensor_model_parallel = False
    return names
