"""PyTorch's own parallelisms around the one model: copies, shards, cut matrices and stages."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness.engines import BUCKET, Batch, Engine, Kind, Piece, StepResult, Widths
from harness.engines.torch.refusals import refusals as refusals
from harness.plan.activations import WIDTH_BYTES

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config import RunConfig, TrainConfig
    from harness.engines.torch.data_parallel import DataParallel
    from harness.engines.torch.scaling import LossScale
    from harness.layout import Layout
    from harness.machine import Machine
    from harness.measure.probe import Probe


class Passes(Protocol):
    """Forward and backward of all micro-batches of a step; gradients are left with the parameters' trained forms."""

    def __call__(self, micro_batches: Sequence[Batch]) -> "Tensor | None":
        """The mean loss over this rank's tokens, detached; None where another stage computes it."""
        ...


def environment(layout: "Layout", machine: "Machine", cache: Path) -> dict[str, str]:
    return {}


def widths(config: "RunConfig", layout: "Layout") -> Widths:
    if layout.offload != "none":
        width, gathered = (WIDTH_BYTES[dtype] for dtype in (config.precision.master, config.precision.compute))
        return Widths(width, 0, 2 * width, gathered=gathered, host_gradients=width)
    if not config.precision.mixed:
        width = WIDTH_BYTES[config.precision.compute]
        return Widths(parameters=width, gradients=width, optimizer=2 * width, gathered=width)
    if layout.data_parallel == "fsdp":  # the sharded fp32 parameters are their own masters
        return Widths(parameters=4, gradients=4, optimizer=8, gathered=2)
    return Widths(parameters=2, gradients=4, optimizer=12, gathered=2)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """The model under this layout.

    The order is fixed: tensor parallel, context parallel, the step's options, data parallel, pipeline.
    """
    import torch.distributed as dist

    from harness.checkpointing import apply_step_options
    from harness.engines.torch.context import apply_context_parallel
    from harness.engines.torch.fully_shard import FullyShard
    from harness.engines.torch.mesh import replica_group
    from harness.engines.torch.passes import Sequential
    from harness.engines.torch.pipeline import Pipeline
    from harness.engines.torch.replicate import Copies, distributed_data_parallel
    from harness.engines.torch.scaling import LossScale
    from harness.engines.torch.tensor import apply_planned, apply_tensor_parallel
    from harness.model import build_model
    from harness.placement import stages_of_rank

    rank = dist.get_rank()
    stages = stages_of_rank(config.model, layout, rank)
    parts = [build_model(config.model, stage) for stage in stages]
    for part in parts:
        part.spans = layout.spans(rank, config.train.seq_len)
        if layout.tp > 1:
            if config.model.asked is not None:
                apply_planned(part, config.model, mesh["tp"])
            else:
                apply_tensor_parallel(part, mesh["tp"], layout.sequence_parallel)
        if layout.cp > 1:
            apply_context_parallel(part, mesh.get_group("cp"), part.spans)
        apply_step_options(part, config, probe)
    parallel: DataParallel
    if layout.data_parallel == "fsdp":
        parallel = FullyShard(parts, config, layout, mesh, device)
    elif layout.data_parallel == "ddp":
        group = replica_group(mesh)
        wrap = distributed_data_parallel(group, device, config)
        parallel = Copies(parts, config, device, wrap, layout.accumulation(config.train))
    else:
        parallel = Copies(parts, config, device)
    scale = LossScale(config.precision, layout.dp * layout.cp)
    passes: Passes = Sequential(parallel, probe, scale, config.train.loss_chunks)
    if layout.pp > 1:
        passes = Pipeline(stages, config, layout, mesh.get_group("pp"), device, parallel, probe, scale)
    shares = mesh.get_group("dp_shard") if layout.gives_whole_parameters else None
    return TorchEngine(parts, config, parallel, passes, mesh, probe, scale, adamw(parallel, config.train, shares))


class TorchEngine:
    """One step of plain PyTorch: the passes of its micro-batches, the global norm, the optimizer."""

    devices = 1

    def __init__(
        self,
        parts: "Sequence[nn.Module]",
        config: "RunConfig",
        parallel: "DataParallel",
        passes: Passes,
        mesh: "DeviceMesh",
        probe: "Probe",
        scale: "LossScale",
        optimizer: "torch.optim.Optimizer",
    ) -> None:
        import torch

        self.model: nn.Module = torch.nn.ModuleList(parts)
        self.parallel = parallel
        self.on_host = parallel.on_host
        self.passes = passes
        self.mesh = mesh
        self.is_tensor_parallel = mesh["tp"].size() > 1
        self.stages = mesh.get_group("pp") if mesh["pp"].size() > 1 else None
        self.spans = mesh.get_group("cp") if mesh["cp"].size() > 1 else None
        self.probe = probe
        self.scale = scale
        self.clipping = config.train.gradient_clipping
        self.optimizer = optimizer

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        from harness.engines.torch.norm import clip, reduce_partial

        with self.context():
            loss = self.passes(micro_batches)
        with self.probe.phase("reduce"):
            trained = [self.parallel.trained(name) for name in self.parallel.names]
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad = reduce_partial(parameter.grad)
            self.scale.unscale([parameter.grad for parameter in trained if parameter.grad is not None])
        self.probe.gradients_ready(self)
        with self.probe.phase("norm"):
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            loss, grad_norm = self.totals(loss, gradients)
        with self.probe.phase("optimizer"):
            if self.scale.allows(grad_norm):
                if self.clipping:
                    clip(gradients, grad_norm, self.clipping)
                self.optimizer.step()
            del gradients
            self.parallel.publish()
        return StepResult(loss, grad_norm)

    @property
    def skipped_steps(self) -> int:
        return self.scale.skipped_steps

    def context(self) -> AbstractContextManager[None]:
        """Where forward, loss and backward run: torch's loss over logits cut along the vocabulary must be told."""
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel() if self.is_tensor_parallel else nullcontext()

    def totals(self, loss: "Tensor | None", gradients: "Sequence[Tensor]") -> "tuple[Tensor, Tensor]":
        """The loss, which only a last stage knows, of its own tokens; the norm, of which each stage has a part."""
        import torch
        import torch.distributed as dist

        from harness.engines.torch.norm import square_of_norm

        square = square_of_norm(gradients, torch.device(self.mesh.device_type))
        sums = torch.stack((square.new_zeros(()) if loss is None else loss.float(), square))
        if self.stages is not None:
            dist.all_reduce(sums, group=self.stages)
        if self.spans is not None:
            dist.all_reduce(sums[0], group=self.spans)
            sums[0] /= self.spans.size()
        return sums[0], sums[1].sqrt()

    def pieces(self, kind: Kind) -> Iterable[Piece]:
        for name, parameter in self.parallel.names.items():
            trained = self.parallel.trained(name)
            if kind == "parameters":
                yield piece(name, parameter.detach())
            elif kind == "gradients":
                if trained.grad is not None:
                    found = piece(name, trained.grad)
                    in_bucket = found.local.untyped_storage().nbytes() > found.local.nbytes
                    yield found._replace(slot=BUCKET) if in_bucket else found
            else:
                if trained is not parameter:
                    yield piece(name, trained.detach(), "master")
                state = getattr(self.optimizer, "optim", self.optimizer).state.get(trained, {})
                yield from (piece(name, state[slot], slot) for slot in MOMENTS if slot in state)

    def buffers(self) -> "Iterable[tuple[str, str, Tensor]]":
        return self.parallel.buffers()

    def close(self) -> None:
        pass


MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(
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
    trained = [parallel.trained(name) for name in parallel.names]
    if shares is None:
        return torch.optim.AdamW(of_one_kind(trained), **settings)
    return ZeroRedundancyOptimizer(trained, torch.optim.AdamW, shares, **settings)


def of_one_kind(parameters: "Sequence[nn.Parameter]") -> "list[dict[str, list[nn.Parameter]]]":
    """Groups for an optimizer, whose kernels take plain tensors or those of one mesh, not both at once."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def piece(name: str, tensor: "Tensor", slot: str = "") -> Piece:
    """What this rank holds of a tensor, whole or sharded."""
    from torch.distributed.tensor import DTensor

    from harness.weights import local_box

    if isinstance(tensor, DTensor):
        return Piece(name, tensor.to_local(), tuple(tensor.shape), local_box(tensor), slot)
    return Piece(name, tensor, tuple(tensor.shape), tuple((0, size) for size in tensor.shape), slot)
