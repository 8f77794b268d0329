"""Stand-ins for the parts of DistributedDataParallel's reducer, which is C++, that fake tensors cannot pass."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as reducer
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

# The second argument must be called `bucket`.
CommunicationHook = Callable[[dist.ProcessGroup, GradBucket], Future[Tensor]]


def all_reduce_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Sum a bucket over the group, as the reducer does by itself; the fake group's own future has no tensor.

    The reducer divides gradients while it copies them to the bucket. It waits for the future of the work when backward
    ends, and asks for it as this does.
    """
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, group=group, async_op=True)
    work.get_future()
    return completed(buffer)


def completed(value: Tensor) -> Future[Tensor]:
    """Return a future that has this value already."""
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


@contextmanager
def communication_hook(hook: CommunicationHook) -> Iterator[None]:
    """Return a context in which DistributedDataParallel reduces buckets by a hook where it has none of its own."""
    pre_forward: Any = DistributedDataParallel._pre_forward

    def pre_forward_with_hook(self: DistributedDataParallel, *arguments: Any, **keywords: Any) -> Any:
        if not self._comm_hooks:
            self.register_comm_hook(self.process_group, hook)
        return pre_forward(self, *arguments, **keywords)

    with mock.patch.object(DistributedDataParallel, "_pre_forward", pre_forward_with_hook):
        yield


@contextmanager
def rebuilt_buckets(bucket_bytes: int) -> Iterator[None]:
    """Return a context in which DDP builds at once the buckets that it would rebuild after the first step.

    Until then it has all gradients in a single bucket, for which it asks by a limit of sys.maxsize.
    """
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def assign_as_rebuilt(parameters: list[Tensor], limits: list[int], *arguments: Any) -> Any:
        if list(limits) != [sys.maxsize]:
            return assign(parameters, limits, *arguments)
        first_bytes: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        indices, sizes = assign(parameters[::-1], [first_bytes, bucket_bytes], *arguments)
        last = len(parameters) - 1
        return [[last - index for index in bucket] for bucket in indices][::-1], sizes[::-1]  # DDP reverses both

    with mock.patch.object(dist, "_compute_bucket_assignment_by_size", assign_as_rebuilt):
        yield


@contextmanager
def ddp_reducer() -> Iterator[None]:
    """Return a context in which DistributedDataParallel wraps models of fake tensors.

    The reducer's rebuilding of buckets in the order in which gradients arrive reads values. Instead they have from the
    start the sizes that it would give them, in the reverse order of the parameters.
    """
    init_helper: Any = DistributedDataParallel._ddp_init_helper

    def init_helper_with_buckets(self: DistributedDataParallel, *arguments: Any, **keywords: Any) -> Any:
        with rebuilt_buckets(self.bucket_bytes_cap):
            return init_helper(self, *arguments, **keywords)

    with (
        communication_hook(all_reduce_bucket),
        mock.patch.object(DistributedDataParallel, "_ddp_init_helper", init_helper_with_buckets),
        mock.patch.object(reducer.Reducer, "_rebuild_buckets", lambda self: False),
    ):
        yield
