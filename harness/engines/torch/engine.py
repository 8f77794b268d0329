"""One training step of plain PyTorch, for any combination of copies, shards and pipeline stages of the model."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from harness.config.optimizer import STATE_NAMES
from harness.config.schema import RunConfig
from harness.engines.base import Batch, Checkpoint, StepResult
from harness.engines.torch.checkpoint import DistributedCheckpoint
from harness.engines.torch.data_parallel import DataParallel, master_params
from harness.engines.torch.grad_norm import clip_gradients, local_part, reduce_partial_grad, squared_grad_norm
from harness.engines.torch.loss_scaler import LossScaler
from harness.engines.torch.micro_batches import GradAccumulationLoop, MicroBatchRunner
from harness.engines.torch.optimizer import build_optimizers
from harness.engines.torch.pipeline_parallel import TiedTable
from harness.layout.layout import Layout
from harness.layout.state_widths import StateKind
from harness.models.decoder import Decoder
from harness.models.init_weights import local_box
from harness.probe import Probe
from harness.tensors.fp32_sums import sums_of_squares
from harness.tensors.shard import BUCKET, Shard


class TorchEngine:
    """An Engine of plain PyTorch: forward and backward of micro-batches, global norm, optimizer."""

    devices = 1
    make_checkpoint: Callable[..., Checkpoint] = DistributedCheckpoint  # of what `checkpoint` hands to it

    def __init__(
        self,
        parts: Sequence[nn.Module],
        config: RunConfig,
        parallel: DataParallel,
        micro_batch_runner: MicroBatchRunner,
        mesh: DeviceMesh,
        probe: Probe,
        loss_scaler: LossScaler,
        optimizers: Sequence[torch.optim.Optimizer],
        tied: TiedTable | None = None,
    ) -> None:
        self.model: nn.Module = torch.nn.ModuleList(parts)
        self.parallel = parallel
        self.host_state = parallel.host_state
        self.micro_batch_runner = micro_batch_runner
        self.mesh = mesh
        self.is_tensor_parallel = mesh["tp"].size() > 1
        self.pp_group = mesh.get_group("pp") if mesh["pp"].size() > 1 else None
        self.cp_group = mesh.get_group("cp") if mesh["cp"].size() > 1 else None
        self.probe = probe
        self.loss_scaler = loss_scaler
        self.max_grad_norm = config.train.gradient_clipping
        self.optimizers = [*optimizers]
        self.tied = tied

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Run one step; see Engine.step."""
        with self.loss_parallel_context():
            loss = self.micro_batch_runner(micro_batches)
        with self.probe.phase("reduce"):
            masters = [*master_params(self.parallel).values()]
            for master in masters:
                assert master.grad is not None
                master.grad = reduce_partial_grad(master.grad)
            self.parallel.reduce_experts()
            if self.tied is not None:
                self.tied.sum_gradients()
            self.loss_scaler.unscale([master.grad for master in masters if master.grad is not None])
        self.probe.gradients_ready(self)
        with self.probe.phase("norm"):
            gradients = [master.grad for master in masters if master.grad is not None]
            squares = sums_of_squares(local_part(gradient) for gradient in gradients)
            copy = self.tied.master if self.tied is not None and self.tied.is_copy else None
            counted = [index for index, master in enumerate(masters) if master is not copy]
            loss, grad_norm = self.reduce_loss_and_norm(
                loss, [gradients[index] for index in counted], [squares[index] for index in counted]
            )
        with self.probe.phase("optimizer"):
            if self.loss_scaler.update_and_check(grad_norm):
                if self.max_grad_norm:
                    clip_gradients(gradients, grad_norm, self.max_grad_norm)
                for optimizer in self.optimizers:
                    optimizer.step()
            del gradients
            self.parallel.sync_model_params()
        return StepResult(loss, grad_norm, squares)

    @property
    def checkpoint(self) -> Checkpoint:
        """Return this engine's checkpoint."""
        return self.make_checkpoint(self.parallel, self.optimizers, self.loss_scaler)

    @property
    def skipped_steps(self) -> int:
        """Return how many steps were skipped so far because a gradient overflowed."""
        return self.loss_scaler.skipped_steps

    def loss_parallel_context(self) -> AbstractContextManager[None]:
        """Return the context for forward, loss and backward: under tensor parallelism the logits are sharded.

        torch computes the cross-entropy of logits that are sharded along the vocabulary only inside loss_parallel.
        """
        return loss_parallel() if self.is_tensor_parallel else nullcontext()

    def reduce_loss_and_norm(
        self, loss: Tensor | None, gradients: Sequence[Tensor], squares: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the global gradient norm, the same on all ranks of a pipeline.

        `squares` has the sum of squares of this rank's part of each gradient. The loss is that of this rank's data;
        only a pipeline's last stage passes one. Each stage adds its part of the norm. Context-parallel ranks average
        the losses of their chunks.
        """
        square = squared_grad_norm(gradients, squares, torch.device(self.mesh.device_type))
        sums = torch.stack((square.new_zeros(()) if loss is None else loss.float(), square))
        if self.pp_group is not None:
            dist.all_reduce(sums, group=self.pp_group)
        if self.cp_group is not None:
            dist.all_reduce(sums[0], group=self.cp_group)
            sums[0] /= self.cp_group.size()
        return sums[0], sums[1].sqrt()

    def local_shards(self, kind: StateKind) -> Iterable[Shard]:
        """Yield this rank's shards of one kind; a gradient that is a view into DDP's bucket has state_name "bucket"."""
        for name, parameter in self.parallel.parameters.items():
            master = self.parallel.master_param(name)
            if kind == "parameters":
                yield to_shard(name, parameter.detach() if parameter.requires_grad else parameter)
            elif kind == "gradients":
                if master.grad is not None:
                    shard = to_shard(name, master.grad)
                    in_bucket = shard.local.untyped_storage().nbytes() > shard.local.nbytes
                    yield shard._replace(state_name=BUCKET) if in_bucket else shard
            else:
                if master is not parameter:
                    yield to_shard(name, master.detach(), "master")
                states = (getattr(optimizer, "optim", optimizer).state for optimizer in self.optimizers)
                state: dict[str, Tensor] = next((state[master] for state in states if master in state), {})
                yield from (to_shard(name, state[moment], moment) for moment in STATE_NAMES if moment in state)

    def named_buffers(self) -> Iterable[tuple[str, str, Tensor]]:
        """Yield (role, label, tensor) for every communication buffer of the copies or shards."""
        return self.parallel.named_buffers()

    def close(self) -> None:
        """Do nothing: all that this engine holds is this process's memory."""


def whole_model_engine(
    model: Decoder,
    config: RunConfig,
    layout: Layout,
    mesh: DeviceMesh,
    probe: Probe,
    parallel: DataParallel,
    accelerator: Any = None,
) -> TorchEngine:
    """Return the engine of a rank that holds all layers, with Accelerate's backward and optimizer if it is given."""
    scaler = LossScaler(config.precision, layout.dp)
    backward = Tensor.backward if accelerator is None else accelerator.backward
    runner = GradAccumulationLoop(parallel, probe, scaler, config.train.loss_chunks, backward)
    optimizers = build_optimizers(master_params(parallel), config)
    if accelerator is not None:
        optimizers = [accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]
    return TorchEngine([model], config, parallel, runner, mesh, probe, scaler, optimizers)


def to_shard(name: str, tensor: Tensor, state_name: str = "") -> Shard:
    """Return the shard of a tensor that this rank holds; a plain tensor is whole."""
    if isinstance(tensor, DTensor):
        return Shard(name, tensor.to_local(), tuple(tensor.shape), local_box(tensor), state_name)
    shape = tuple(getattr(tensor, "quant_state", tensor).shape)  # of what packed values stand for
    return Shard(name, tensor, shape, tuple((0, size) for size in shape), state_name)
