"""Copies of what a rank holds of the model: one alone, or kept together by DistributedDataParallel.

In mixed precision the copies are 16-bit and the optimizer trains fp32 masters; gradients are summed over
micro-batches and over ranks in fp32 (mixed precision training, arXiv 1710.03740, with fp32 accumulation).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from harness.config.schema import RunConfig
from harness.cost_model.buffers import bucket_views, ddp_options
from harness.layout.state_widths import StateKind
from harness.models.decoder import Decoder
from harness.models.init_weights import initial_value, local_part_like, materialize


class ReplicatedParams:
    """Parts of a model as they are, with fp32 masters beside 16-bit parameters where the precision is mixed."""

    host_state: tuple[StateKind, ...] = ()

    def __init__(
        self,
        parts: Sequence[Decoder],
        config: RunConfig,
        device: torch.device,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        accumulation: int = 1,
    ) -> None:
        precision, seed = config.precision, config.train.seed
        for part in parts:
            materialize(part, config.model, seed, device, getattr(torch, precision.compute))
        self.parameters = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        self.masters: dict[str, nn.Parameter] = {}
        self.buckets: list[list[Tensor]] = []  # of every wrapper that has masters, as it last reduced them
        self.modules: list[nn.Module] = list(parts)
        self.is_synchronizing = True
        # Else the first micro-batch would make gradients beside the buckets that wait for their sum.
        self.accumulates_in_buckets = wrap is not None and not precision.is_mixed and accumulation > 1 and bucket_views(config)
        if precision.is_mixed:
            for name, parameter in self.parameters.items():
                value = initial_value(name, parameter.shape, config.model, seed, device)
                self.masters[name] = nn.Parameter(
                    local_part_like(parameter, value.to(getattr(torch, precision.master)))
                )
        if wrap is not None:
            self.modules = [wrap(module) for module in self.modules]
        if precision.is_mixed:
            self.accumulate_in_masters()

    def accumulate_in_masters(self) -> None:
        master_of = {parameter: self.masters[name] for name, parameter in self.parameters.items()}

        def accumulate(parameter: Tensor) -> None:
            move_grad_to_master(parameter, master_of[parameter])  # type: ignore[index]

        synchronised = [module for module in self.modules if isinstance(module, DistributedDataParallel)]
        for module in synchronised:
            self.buckets.append([])
            module.register_comm_hook((self, module.process_group, self.buckets[-1]), reduce_into_masters)
        if synchronised:

            def accumulate_unless_synchronising(parameter: Tensor) -> None:
                if not self.is_synchronizing:  # else DDP takes the gradient to its bucket and our hook there
                    accumulate(parameter)

            hook = accumulate_unless_synchronising
        else:
            hook = accumulate
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def sync_context(self, last: bool, part: int = 0) -> Iterator[None]:
        """Copies synchronise once a step, in the last micro-batch."""
        self.is_synchronizing = last
        module = self.modules[part]
        if isinstance(module, DistributedDataParallel) and not last:
            with self.no_sync(module):
                yield
        else:
            yield

    def collect_grads(self, part: int = 0) -> None:
        for name, master in self.masters.items():
            if self.parameters[name].grad is not None:
                move_grad_to_master(self.parameters[name], master)

    def no_sync(self, module: DistributedDataParallel) -> AbstractContextManager[None]:
        return module.no_sync()

    def master_param(self, name: str) -> nn.Parameter:
        return self.masters.get(name, self.parameters[name])

    def named_buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        for bucket in chain.from_iterable(self.buckets):
            yield "communication", "buckets", bucket

    def sync_model_params(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                trained = self.master_param(name)
                if trained is not parameter:
                    parameter.copy_(trained)
                if self.accumulates_in_buckets and trained.grad is not None:
                    trained.grad.zero_()
                else:
                    trained.grad = None
                    parameter.grad = None


def distributed_data_parallel(
    group: ProcessGroup, device: torch.device, config: RunConfig
) -> Callable[[nn.Module], DistributedDataParallel]:
    """Wraps a model that every rank of the group holds; strategy.options are the wrapper's own."""
    return functools.partial(
        DistributedDataParallel,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        init_sync=False,  # weights are the same already; a broadcast's copies go when its backend comes to it
        **ddp_options(config),
    )


def move_grad_to_master(parameter: Tensor, master: nn.Parameter) -> None:
    """Adds a parameter's gradient to its master's, and lets go of it."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def reduce_into_masters(
    state: tuple[ReplicatedParams, ProcessGroup, list[Tensor]], bucket: GradBucket
) -> Future[Tensor]:
    """DDP's communication hook: averages a bucket with what was accumulated before, in the masters' width.

    DDP gets its 16-bit bucket back as it was; the averaged gradient lies with the masters.
    """
    replica, group, buckets = state
    if bucket.index() == 0:  # DDP makes others after the first step
        buckets.clear()
    buckets.append(bucket.buffer())
    name_of = {id(parameter): name for name, parameter in replica.parameters.items()}
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
