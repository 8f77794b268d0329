"""Copies of what a rank holds of the model: one alone, or kept together by DistributedDataParallel.

In mixed precision the copies are 16-bit and the optimizer trains fp32 masters; gradients are summed over
micro-batches and over ranks in fp32 (mixed precision training, arXiv 1710.03740, with fp32 accumulation).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from harness.config import RunConfig
from harness.engines import Kind
from harness.model import Llama, initial_value, materialise, part_like


class Replicate:
    """Parts of a model as they are, with fp32 masters beside 16-bit parameters where the precision is mixed."""

    on_host: tuple[Kind, ...] = ()

    def __init__(
        self,
        parts: Sequence[Llama],
        config: RunConfig,
        device: torch.device,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        precision, seed = config.precision, config.train.seed
        for part in parts:
            materialise(part, config.model, seed, device, getattr(torch, precision.compute))
        self.names = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        self.masters: dict[str, nn.Parameter] = {}
        self.module: nn.Module = parts[0]
        self.synchronising = True
        if precision.mixed:
            for name, parameter in self.names.items():
                value = initial_value(name, parameter.shape, config.model, seed, device)
                self.masters[name] = nn.Parameter(part_like(parameter, value.to(getattr(torch, precision.master))))
        if wrap is not None:
            self.module = wrap(self.module)
        if precision.mixed:
            self.accumulate_in_masters()

    def accumulate_in_masters(self) -> None:
        master_of = {parameter: self.masters[name] for name, parameter in self.names.items()}

        def accumulate(parameter: Tensor) -> None:
            take_gradient(parameter, master_of[parameter])  # type: ignore[index]

        if isinstance(self.module, DistributedDataParallel):
            self.module.register_comm_hook(self, reduce_into_masters)

            def accumulate_unless_synchronising(parameter: Tensor) -> None:
                if not self.synchronising:  # else DDP takes the gradient to its bucket and our hook there
                    accumulate(parameter)

            hook = accumulate_unless_synchronising
        else:
            hook = accumulate
        for parameter in self.names.values():
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Copies synchronise once a step, in the last micro-batch."""
        self.synchronising = last
        if isinstance(self.module, DistributedDataParallel) and not last:
            with self.unsynchronised():
                yield
        else:
            yield

    def collect(self) -> None:
        for name, master in self.masters.items():
            if self.names[name].grad is not None:
                take_gradient(self.names[name], master)

    def unsynchronised(self) -> AbstractContextManager[None]:
        assert isinstance(self.module, DistributedDataParallel)
        return self.module.no_sync()

    def trained(self, name: str) -> nn.Parameter:
        return self.masters.get(name, self.names[name])

    def buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        return iter(())

    def publish(self) -> None:
        with torch.no_grad():
            for name, master in self.masters.items():
                self.names[name].copy_(master)
                self.names[name].grad = None


def distributed_data_parallel(
    mesh: DeviceMesh, device: torch.device, config: RunConfig
) -> Callable[[nn.Module], DistributedDataParallel]:
    """Wraps a model on every rank of dp_replicate; strategy.options are the wrapper's own."""
    return functools.partial(
        DistributedDataParallel,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group("dp_replicate"),
        **config.strategy.options,
    )


def take_gradient(parameter: Tensor, master: nn.Parameter) -> None:
    """Adds a parameter's gradient to its master's, and lets go of it."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def reduce_into_masters(replica: Replicate, bucket: GradBucket) -> Future[Tensor]:
    """DDP's communication hook: averages a bucket with what was accumulated before, in the masters' width.

    DDP gets its 16-bit bucket back as it was; the averaged gradient lies with the masters.
    """
    assert isinstance(replica.module, DistributedDataParallel)
    group = replica.module.process_group
    name_of = {id(parameter): name for name, parameter in replica.names.items()}
    masters = [replica.masters[name_of[id(parameter)]] for parameter in bucket.parameters()]
    total = bucket.buffer().to(masters[0].dtype)
    views = [view.view_as(m) for m, view in zip(masters, torch.split(total, [m.numel() for m in masters]), strict=True)]
    for master, view in zip(masters, views, strict=True):
        if master.grad is not None:
            view.add_(master.grad)
        master.grad = view
    total.div_(group.size())
    work = dist.all_reduce(total, group=group, async_op=True)
    return work.get_future().then(lambda _: bucket.buffer())  # type: ignore[no-any-return]
