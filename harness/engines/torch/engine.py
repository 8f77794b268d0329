"""TODO harness.engines.torch.engine."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from harness.engines.base import Batch, StepResult
from harness.engines.torch.micro_batches import MicroBatchRunner
from harness.layout.state_widths import StateKind
from harness.tensors.shard import BUCKET, Shard

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig, TrainConfig
    from harness.engines.torch.data_parallel import DataParallel
    from harness.engines.torch.loss_scaler import LossScaler
    from harness.probe import Probe


class TorchEngine:
    """One step of plain PyTorch: the passes of its micro-batches, the global norm, the optimizer."""

    devices = 1

    def __init__(
        self,
        parts: "Sequence[nn.Module]",
        config: "RunConfig",
        parallel: "DataParallel",
        passes: MicroBatchRunner,
        mesh: "DeviceMesh",
        probe: "Probe",
        scale: "LossScaler",
        optimizer: "torch.optim.Optimizer",
    ) -> None:
        import torch

        self.model: nn.Module = torch.nn.ModuleList(parts)
        self.parallel = parallel
        self.host_state = parallel.host_state
        self.passes = passes
        self.mesh = mesh
        self.is_tensor_parallel = mesh["tp"].size() > 1
        self.stages = mesh.get_group("pp") if mesh["pp"].size() > 1 else None
        self.cp_group = mesh.get_group("cp") if mesh["cp"].size() > 1 else None
        self.probe = probe
        self.scale = scale
        self.clipping = config.train.gradient_clipping
        self.optimizer = optimizer

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        from harness.engines.torch.grad_norm import clip_gradients, reduce_partial_grad

        with self.loss_parallel_context():
            loss = self.passes(micro_batches)
        with self.probe.phase("reduce"):
            trained = [self.parallel.master_param(name) for name in self.parallel.names]
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad = reduce_partial_grad(parameter.grad)
            self.scale.unscale([parameter.grad for parameter in trained if parameter.grad is not None])
        self.probe.gradients_ready(self)
        with self.probe.phase("norm"):
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            loss, grad_norm = self.reduce_loss_and_norm(loss, gradients)
        with self.probe.phase("optimizer"):
            if self.scale.update_and_check(grad_norm):
                if self.clipping:
                    clip_gradients(gradients, grad_norm, self.clipping)
                self.optimizer.step()
            del gradients
            self.parallel.sync_model_params()
        return StepResult(loss, grad_norm)

    @property
    def skipped_steps(self) -> int:
        return self.scale.skipped_steps

    def loss_parallel_context(self) -> AbstractContextManager[None]:
        """Where forward, loss and backward run: torch's loss over logits cut along the vocabulary must be told."""
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel() if self.is_tensor_parallel else nullcontext()

    def reduce_loss_and_norm(self, loss: "Tensor | None", gradients: "Sequence[Tensor]") -> "tuple[Tensor, Tensor]":
        """The loss, which only a last stage knows, of its own tokens; the norm, of which each stage has a part."""
        import torch
        import torch.distributed as dist

        from harness.engines.torch.grad_norm import squared_grad_norm

        square = squared_grad_norm(gradients, torch.device(self.mesh.device_type))
        sums = torch.stack((square.new_zeros(()) if loss is None else loss.float(), square))
        if self.stages is not None:
            dist.all_reduce(sums, group=self.stages)
        if self.cp_group is not None:
            dist.all_reduce(sums[0], group=self.cp_group)
            sums[0] /= self.cp_group.size()
        return sums[0], sums[1].sqrt()

    def local_shards(self, kind: StateKind) -> Iterable[Shard]:
        for name, parameter in self.parallel.names.items():
            trained = self.parallel.master_param(name)
            if kind == "parameters":
                yield to_shard(name, parameter.detach())
            elif kind == "gradients":
                if trained.grad is not None:
                    found = to_shard(name, trained.grad)
                    in_bucket = found.local.untyped_storage().nbytes() > found.local.nbytes
                    yield found._replace(state_name=BUCKET) if in_bucket else found
            else:
                if trained is not parameter:
                    yield to_shard(name, trained.detach(), "master")
                state = getattr(self.optimizer, "optim", self.optimizer).state.get(trained, {})
                yield from (to_shard(name, state[slot], slot) for slot in MOMENTS if slot in state)

    def named_buffers(self) -> "Iterable[tuple[str, str, Tensor]]":
        return self.parallel.buffers()

    def close(self) -> None:
        pass


MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(
    parallel: "DataParallel", train: "TrainConfig", shares: "dist.ProcessGroup | None" = None
) -> "torch.optim.Optimizer":
    """AdamW of what is trained; with a group its ranks step some parameters each, and broadcast them."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    settings: dict[str, Any] = {"lr": train.lr, "betas": train.betas, "eps": train.eps}
    # fused: the one implementation without temporaries the size of the model
    settings |= {
        "weight_decay": train.weight_decay,
        "fused": train.fused_optimizer,
        "foreach": not train.fused_optimizer,
    }
    trained = [parallel.master_param(name) for name in parallel.names]
    if shares is None:
        return torch.optim.AdamW(group_by_mesh(trained), **settings)
    return ZeroRedundancyOptimizer(trained, torch.optim.AdamW, shares, **settings)


def group_by_mesh(parameters: "Sequence[nn.Parameter]") -> "list[dict[str, list[nn.Parameter]]]":
    """Groups for an optimizer, whose kernels take plain tensors or those of one mesh, not both at once."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def to_shard(name: str, tensor: "Tensor", slot: str = "") -> Shard:
    """What this rank holds of a tensor, whole or sharded."""
    from torch.distributed.tensor import DTensor

    from harness.models.init_weights import local_box

    if isinstance(tensor, DTensor):
        return Shard(name, tensor.to_local(), tuple(tensor.shape), local_box(tensor), slot)
    return Shard(name, tensor, tuple(tensor.shape), tuple((0, size) for size in tensor.shape), slot)
