"""PyTorch's own parallelisms around the one model: copies, shards, cut matrices and stages."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.engines import BUCKET, Batch, Engine, Kind, Piece, StepResult, Widths

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config import RunConfig
    from harness.engines.torch.data_parallel import DataParallel
    from harness.layout import Layout
    from harness.machine import Machine
    from harness.measure.probe import Probe

# DistributedDataParallel's arguments that change how it works and not what it trains.
DDP_OPTIONS = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


class Passes(Protocol):
    """Forward and backward of all micro-batches of a step; gradients are left with the parameters' trained forms."""

    def __call__(self, micro_batches: Sequence[Batch]) -> "Tensor | None":
        """The mean loss over this rank's tokens, detached; None where another stage computes it."""
        ...


def refusals(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    stage, means = layout.zero_stage, layout.data_parallel
    if means == "none" and layout.dp > 1:
        yield f"strategy.data_parallel=none trains on one rank, not {layout.dp}: choose ddp or fsdp"
    if means == "none" and stage > 0:
        yield f"strategy.zero_stage={stage} needs strategy.data_parallel=fsdp: choose it, or zero_stage 0"
    if means == "ddp" and stage > 0:
        yield f"strategy.zero_stage={stage} is not DistributedDataParallel's: choose strategy.data_parallel=fsdp"
    if means == "ddp" and layout.dp_shard > 1:
        yield f"strategy.dp_shard={layout.dp_shard} shards nothing under strategy.data_parallel=ddp: choose 1"
    if means == "fsdp" and stage == 1:
        yield "strategy.zero_stage=1 is not a mode of fully_shard: choose 0, 2 or 3, or strategy=zero1"
    if means == "fsdp" and stage == 0 and layout.dp_shard > 1:
        yield f"strategy.dp_shard={layout.dp_shard} shards parameters, not what strategy.zero_stage=0 says: choose 1"
    for axis in ("tp", "pp"):
        if getattr(layout, axis) > 1 and layout.world_size > getattr(layout, axis):
            yield f"strategy.{axis}={getattr(layout, axis)} beside other degrees is not supported yet: choose 1 there"
    if layout.pp > 1 and means != "none":
        yield f"strategy.data_parallel={means} with strategy.pp={layout.pp} is not supported yet: choose none"
    if layout.tp > 1 and means == "ddp":
        yield f"strategy.data_parallel=ddp cannot wrap what strategy.tp={layout.tp} cuts: choose none or fsdp"
    if layout.offload != "none" and means != "fsdp":
        yield (
            f"strategy.offload={layout.offload} is not part of strategy.data_parallel={means}: choose none, or"
            " strategy=fsdp_full_shard or zero_offload"
        )
    elif layout.offload == "optimizer":
        yield (
            "strategy.offload=optimizer is not a policy of fully_shard, whose optimizer steps where the parameters lie:"
            " choose parameters, or strategy=zero_offload"
        )
    if not layout.vocabulary_parallel:
        yield "strategy.vocabulary_parallel=false is not supported by strategy.engine=torch: choose true"
    for key in sorted(config.strategy.options.keys() - set(DDP_OPTIONS)) if means == "ddp" else ():
        yield f"strategy.options.{key} is not a setting of DistributedDataParallel: choose {', '.join(DDP_OPTIONS)}"
    if means != "ddp" and config.strategy.options:
        yield f"strategy.options={config.strategy.options} are for strategy.data_parallel=ddp: choose {{}}"


def environment(machine: "Machine", cache: Path) -> dict[str, str]:
    return {}


def widths(config: "RunConfig", layout: "Layout") -> Widths:
    if layout.offload != "none":
        return Widths(4, 0, 8, gathered=2 if config.precision.mixed else 4, host_gradients=4)
    if not config.precision.mixed:
        return Widths(parameters=4, gradients=4, optimizer=8, gathered=4)
    if layout.data_parallel == "fsdp":  # the sharded fp32 parameters are their own masters
        return Widths(parameters=4, gradients=4, optimizer=8, gathered=2)
    return Widths(parameters=2, gradients=4, optimizer=12, gathered=2)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """The model under this layout. The order is fixed: tensor parallel, checkpointing, data parallel, pipeline."""
    import torch.distributed as dist

    from harness.activation_offload import offload_activations
    from harness.checkpointing import apply_checkpointing
    from harness.engines.torch.fully_shard import FullyShard
    from harness.engines.torch.passes import Sequential
    from harness.engines.torch.pipeline import Pipeline
    from harness.engines.torch.replicate import Replicate, distributed_data_parallel
    from harness.engines.torch.tensor import apply_tensor_parallel
    from harness.model import build_model
    from harness.placement import stages_of_rank

    stages = stages_of_rank(config.model, layout, dist.get_rank())
    parts = [build_model(config.model, stage) for stage in stages]
    for part in parts:
        if layout.tp > 1:
            apply_tensor_parallel(part, mesh["tp"], layout.sequence_parallel)
        apply_checkpointing(part, config.checkpointing, probe)
        if config.checkpointing.offload_activations:
            offload_activations(part, probe)
    parallel: DataParallel
    if layout.data_parallel == "fsdp":
        parallel = FullyShard(parts[0], config, layout, mesh, device)
    elif layout.data_parallel == "ddp":
        parallel = Replicate(parts, config, device, distributed_data_parallel(mesh, device, config))
    else:
        parallel = Replicate(parts, config, device)
    passes: Passes = Sequential(parallel, probe)
    if layout.pp > 1:
        passes = Pipeline(parts, stages, config, layout, mesh.get_group("pp"), device, parallel, probe)
    return TorchEngine(parts, config, parallel, passes, mesh, probe)


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
    ) -> None:
        import torch

        self.model: nn.Module = torch.nn.ModuleList(parts)
        self.parallel = parallel
        self.on_host = parallel.on_host
        self.passes = passes
        self.mesh = mesh
        self.is_tensor_parallel = mesh["tp"].size() > 1
        self.stages = mesh.get_group("pp") if mesh["pp"].size() > 1 else None
        self.probe = probe
        self.clipping = config.train.gradient_clipping
        train = config.train
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            of_one_kind([parallel.trained(name) for name in parallel.names]),
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,  # the one implementation without temporaries the size of the model
        )

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        from harness.engines.torch.norm import clip, reduce_partial

        with self.context():
            loss = self.passes(micro_batches)
        with self.probe.phase("reduce"):
            trained = [self.parallel.trained(name) for name in self.parallel.names]
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad = reduce_partial(parameter.grad)
        self.probe.gradients_ready(self)
        with self.probe.phase("norm"):
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            loss, grad_norm = self.totals(loss, gradients)
        with self.probe.phase("optimizer"):
            if self.clipping:
                clip(gradients, grad_norm, self.clipping)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            del gradients
            self.parallel.publish()
        return StepResult(loss, grad_norm)

    def context(self) -> AbstractContextManager[None]:
        """Where forward, loss and backward run: torch's loss over logits cut along the vocabulary must be told."""
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel() if self.is_tensor_parallel else nullcontext()

    def totals(self, loss: "Tensor | None", gradients: "Sequence[Tensor]") -> "tuple[Tensor, Tensor]":
        """The loss, which only the last stage knows, and the global norm, of which each stage holds a part."""
        import torch
        import torch.distributed as dist

        from harness.engines.torch.norm import square_of_norm

        square = square_of_norm(gradients, self.mesh)
        sums = torch.stack((square.new_zeros(()) if loss is None else loss.float(), square))
        if self.stages is not None:
            dist.all_reduce(sums, group=self.stages)
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
                for slot in ("exp_avg", "exp_avg_sq"):
                    if slot in self.optimizer.state[trained]:
                        yield piece(name, self.optimizer.state[trained][slot], slot)

    def buffers(self) -> "Iterable[tuple[str, str, Tensor]]":
        return self.parallel.buffers()

    def close(self) -> None:
        pass


def of_one_kind(parameters: "Sequence[nn.Parameter]") -> "list[dict[str, list[nn.Parameter]]]":
    """Groups for an optimizer, whose kernels take plain tensors or those of one mesh, not both at once."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def piece(name: str, tensor: "Tensor", slot: str = "") -> Piece:
    """What this rank holds of a tensor, whole or sharded."""
    from torch.distributed.tensor import DTensor

    from harness.model import local_box

    if isinstance(tensor, DTensor):
        return Piece(name, tensor.to_local(), tuple(tensor.shape), local_box(tensor), slot)
    return Piece(name, tensor, tuple(tensor.shape), tuple((0, size) for size in tensor.shape), slot)
