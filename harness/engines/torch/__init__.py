"""PyTorch's own parallelisms around the one model: DistributedDataParallel and fully_shard (FSDP2)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.engines import BUCKET, Batch, Engine, Kind, Piece, StepResult, Widths

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config import RunConfig
    from harness.layout import Layout
    from harness.machine import Machine
    from harness.measure.probe import Probe

# DistributedDataParallel's arguments that change how it works and not what it trains.
DDP_OPTIONS = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


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
    for key in sorted(config.strategy.options.keys() - set(DDP_OPTIONS)) if means == "ddp" else ():
        yield f"strategy.options.{key} is not a setting of DistributedDataParallel: choose {', '.join(DDP_OPTIONS)}"
    if means != "ddp" and config.strategy.options:
        yield f"strategy.options={config.strategy.options} are for strategy.data_parallel=ddp: choose {{}}"


def environment(machine: "Machine", cache: Path) -> dict[str, str]:
    return {}


def widths(config: "RunConfig", layout: "Layout") -> Widths:
    if not config.precision.mixed:
        return Widths(parameters=4, gradients=4, optimizer=8, gathered=4)
    if layout.data_parallel == "fsdp":  # the sharded fp32 parameters are their own masters
        return Widths(parameters=4, gradients=4, optimizer=8, gathered=2)
    return Widths(parameters=2, gradients=4, optimizer=12, gathered=2)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """The model under this layout. The order is fixed: checkpointing, then data parallel."""
    from harness.checkpointing import model_on_meta
    from harness.engines.torch.fully_shard import FullyShard
    from harness.engines.torch.replicate import Replicate, distributed_data_parallel

    model = model_on_meta(config, probe)
    parallel: DataParallel
    if layout.data_parallel == "fsdp":
        parallel = FullyShard(model, config, layout, mesh, device)
    elif layout.data_parallel == "ddp":
        parallel = Replicate(model, config, device, distributed_data_parallel(mesh, device, config))
    else:
        parallel = Replicate(model, config, device)
    return TorchEngine(model, config, parallel, probe)


class DataParallel(Protocol):
    """How copies or shards of a model are kept together."""

    module: "nn.Module"  # what is called
    names: dict[str, "nn.Parameter"]  # the model's parameters under their plain names

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch."""
        ...

    def trained(self, name: str) -> "nn.Parameter":
        """What the optimizer updates for a parameter: itself, or its fp32 master; holds the gradient."""
        ...

    def publish(self) -> None:
        """After the optimizer: brings the model up to what was trained, and drops gradients."""
        ...


class TorchEngine:
    """One step of plain PyTorch over a data-parallel model."""

    devices = 1

    def __init__(self, model: "nn.Module", config: "RunConfig", parallel: DataParallel, probe: "Probe") -> None:
        import torch

        self.model = model
        self.parallel = parallel
        self.probe = probe
        self.clipping = config.train.gradient_clipping
        train = config.train
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [parallel.trained(name) for name in parallel.names],
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,  # the one implementation without temporaries the size of the model
        )

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        import torch

        from harness.model import loss_function

        count = len(micro_batches)
        losses = []
        for index, batch in enumerate(micro_batches):
            with self.parallel.micro_batch(last=index == count - 1):
                with self.probe.phase("forward"):
                    loss = loss_function(self.parallel.module(batch.inputs), batch.targets)
                losses.append(loss.detach())
                with self.probe.phase("backward"):
                    self.backward(loss / count)
            del loss
        self.probe.gradients_ready(self)
        with self.probe.phase("optimizer"):
            grad_norm = self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.parallel.publish()
        return StepResult(torch.stack(losses).mean(), grad_norm)

    def backward(self, loss: "Tensor") -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self) -> "Tensor":
        """Scales gradients to the configured norm; the norm before, over all ranks."""
        from torch.distributed.tensor import DTensor
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        trained = [self.parallel.trained(name) for name in self.parallel.names]
        norm = get_total_norm([p.grad for p in trained if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.clipping:
            clip_grads_with_norm_(trained, self.clipping, norm)
        return norm.detach()

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

    def close(self) -> None:
        pass


def piece(name: str, tensor: "Tensor", slot: str = "") -> Piece:
    """What this rank holds of a tensor, whole or sharded."""
    from torch.distributed.tensor import DTensor

    from harness.model import local_box

    if isinstance(tensor, DTensor):
        return Piece(name, tensor.to_local(), tuple(tensor.shape), local_box(tensor), slot)
    return Piece(name, tensor, tuple(tensor.shape), tuple((0, size) for size in tensor.shape), slot)
