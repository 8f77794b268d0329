"""Unsharded parameters: a single copy of the model, or copies that DistributedDataParallel synchronizes.

In mixed precision the model is 16-bit and the optimizer trains fp32 masters; gradients are summed over micro-batches
and over ranks in fp32 (mixed precision training, arXiv 1710.03740, with fp32 accumulation).
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from harness.config.schema import RunConfig
from harness.engines.torch.grad_norm import local_part
from harness.layout.state_widths import StateKind
from harness.models.decoder import Decoder
from harness.models.grouped import GroupedLinear
from harness.models.init_weights import materialize


class ReplicatedParams:
    """Unsharded parts of a model, with fp32 masters beside 16-bit parameters where the precision is mixed."""

    host_state: tuple[StateKind, ...] = ()

    def __init__(
        self,
        parts: Sequence[Decoder],
        config: RunConfig,
        device: torch.device,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        accumulation: int = 1,
        no_sync: Callable[[DistributedDataParallel], AbstractContextManager[None]] = DistributedDataParallel.no_sync,
        experts: "DividedExperts | None" = None,
    ) -> None:
        """Fill the parts unless they are, and wrap them.

        In mixed precision the masters have the parameters' values, and the parameters are narrowed. `no_sync` is the
        context in which a wrapper does not synchronize gradients.
        """
        self.no_sync = no_sync
        self.experts = experts
        self.parts = parts
        precision = config.precision
        compute, master = getattr(torch, precision.compute), getattr(torch, precision.master)
        for part in parts:
            materialize(part, config.model, config.train.seed, device, compute, trained_dtype=master)
        self.parameters = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        self.trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self.masters: dict[str, nn.Parameter] = {}
        self.buckets: list[list[Tensor]] = []  # the buckets that each DDP wrapper with masters reduced last
        self.modules: list[nn.Module] = list(parts)
        self.is_synchronizing = True
        # Gradients that are views into DDP's buckets are zeroed and not freed, because after a free the first
        # micro-batch would allocate gradients beside the buckets.
        has_bucket_views = wrap is not None and not precision.is_mixed and config.strategy.gradient_as_bucket_view
        self.accumulates_in_buckets = has_bucket_views and accumulation > 1
        if precision.is_mixed:
            self.masters = {name: nn.Parameter(own.detach().to(master)) for name, own in self.trained.items()}
            for parameter in self.parameters.values():
                if parameter.is_floating_point() and parameter.dtype != compute:
                    narrow = nn.Parameter(parameter.detach().to(compute), parameter.requires_grad)
                    torch.utils.swap_tensors(parameter, narrow)  # type: ignore[no-untyped-call]
        if wrap is not None:
            for part in parts if experts is not None else ():
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, expert_names(part))  # type: ignore[no-untyped-call]
            self.modules = [wrap(module) for module in self.modules]
        if precision.is_mixed:
            self.accumulate_in_masters()

    def accumulate_in_masters(self) -> None:
        """Register hooks that add every gradient to its master's, within DDP's buckets if DDP synchronizes."""
        master_of: dict[Tensor, nn.Parameter] = {own: self.masters[name] for name, own in self.trained.items()}
        wrappers = [module for module in self.modules if isinstance(module, DistributedDataParallel)]
        for module in wrappers:
            self.buckets.append([])
            module.register_comm_hook((self, module.process_group, self.buckets[-1]), reduce_into_masters)

        def accumulate(parameter: Tensor) -> None:
            # Otherwise DDP copies it to its bucket, for reduce_into_masters.
            if isinstance(parameter, DTensor) or not (wrappers and self.is_synchronizing):
                move_grad_to_master(parameter, master_of[parameter])

        for parameter in self.trained.values():
            parameter.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]

    @contextmanager
    def sync_context(self, last: bool, part: int = 0) -> Iterator[None]:
        """Return a context that synchronizes the copies only in the step's last micro-batch."""
        self.is_synchronizing = last
        module = self.modules[part]
        if isinstance(module, DistributedDataParallel) and not last:
            with self.no_sync(module):
                yield
        else:
            yield

    def collect_grads(self, part: int = 0) -> None:
        """Move gradients that no hook has processed to the masters."""
        for name, master in self.masters.items():
            if self.parameters[name].grad is not None:
                move_grad_to_master(self.parameters[name], master)

    def reduce_experts(self) -> None:
        """Average the gradients of this rank's experts, in place, each by a message of its own when backward has ended.

        They are sums over the tokens of all ranks that have other experts.
        """
        if self.experts is None:
            return
        names = [name for part in self.parts for name in expert_names(part)]
        gradients = [local_part(gradient) for name in names if (gradient := self.master_param(name).grad) is not None]
        torch._foreach_div_(gradients, self.experts.averaged_over)
        if self.experts.copies.size() > 1:
            works = [dist.all_reduce(gradient, group=self.experts.copies, async_op=True) for gradient in gradients]
            for work in works:
                work.wait()

    def master_param(self, name: str) -> nn.Parameter:
        """Return a parameter's fp32 master, or the parameter itself where there are no masters."""
        return self.masters.get(name, self.parameters[name])

    def named_buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the buckets that were reduced into masters."""
        for bucket in chain.from_iterable(self.buckets):
            yield "communication", "buckets", bucket

    def sync_model_params(self) -> None:
        """Copy the updated masters into the model, and free the gradients or zero those that are bucket views.

        One operator, which takes no DTensors, copies all of them: on a GPU hundreds of small kernels would slow these
        strategies alone.
        """
        with torch.no_grad():
            if self.masters:
                copies = [local_part(self.parameters[name]) for name in self.masters]
                torch._foreach_copy_(copies, [local_part(master) for master in self.masters.values()])
            trained = [self.master_param(name) for name in self.parameters]
            if self.accumulates_in_buckets:
                torch._foreach_zero_([p.grad for p in trained if p.grad is not None and not isinstance(p, DTensor)])
                trained = [p for p in trained if isinstance(p, DTensor)]  # experts, whose gradients no bucket has
            else:
                trained += self.parameters.values()
            for parameter in trained:
                parameter.grad = None


class DividedExperts(NamedTuple):
    """The ranks over which gradients of experts are averaged where expert parallelism divides these."""

    copies: ProcessGroup  # of those that have the same experts
    averaged_over: int  # the number of those that process different tokens


def expert_names(model: nn.Module) -> list[str]:
    """Return the names of the experts' weights."""
    grouped = ((path, module) for path, module in model.named_modules() if isinstance(module, GroupedLinear))
    return [f"{path}.{name}" for path, module in grouped for name, _ in module.named_parameters()]


def distributed_data_parallel(
    group: ProcessGroup, device: torch.device, config: RunConfig
) -> Callable[[nn.Module], DistributedDataParallel]:
    """Return a function that wraps a model in DDP over `group`, with strategy.options as DDP's own arguments."""
    # torch 2.13 deprecates the name `broadcast_buffers` for one that earlier versions do not know.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    return functools.partial(
        DistributedDataParallel,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        init_sync=False,  # the weights are equal already, and a broadcast's copies would be freed late
        **config.strategy.ddp_options,
    )


def move_grad_to_master(parameter: Tensor, master: nn.Parameter) -> None:
    """Add a parameter's gradient to its master's, and free it."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def reduce_into_masters(
    state: tuple[ReplicatedParams, ProcessGroup, list[Tensor]], bucket: GradBucket
) -> Future[Tensor]:
    """Average a bucket and the gradients accumulated before it in the masters' dtype, as a communication hook of DDP.

    DDP gets its 16-bit bucket back unchanged; the averaged gradients become those of the masters.
    """
    replica, group, buckets = state
    if bucket.index() == 0:  # DDP builds new buckets after the first step
        buckets.clear()
    buckets.append(bucket.buffer())
    name_of = {id(parameter): name for name, parameter in replica.parameters.items()}
    masters = [replica.masters[name_of[id(parameter)]] for parameter in bucket.parameters()]
    total = bucket.buffer().to(masters[0].dtype)
    flat_views = torch.split(total, [master.numel() for master in masters])
    views = [view.view_as(master) for master, view in zip(masters, flat_views, strict=True)]
    for master, view in zip(masters, views, strict=True):
        if master.grad is not None:
            view.add_(master.grad)
        master.grad = view
    total.div_(group.size())
    work = dist.all_reduce(total, group=group, async_op=True)
    return work.get_future().then(lambda _: bucket.buffer())  # type: ignore[no-any-return]
