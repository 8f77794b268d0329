"""Stand-ins for the parts of DistributedDataParallel's reducer, which is C++, that fake tensors cannot pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    """Average a bucket over the group, as the reducer does by itself; the fake group's own future has no tensor.

    The reducer waits for the future of the work when backward ends, and asks for it as this does.
    """
    buffer = bucket.buffer().div_(group.size())
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
def ddp_reducer() -> Iterator[None]:
    """Return a context in which DistributedDataParallel wraps models of fake tensors.

    Buckets keep their first order: the reducer's rebuilding of them in the order in which gradients arrive reads
    values. Their sizes and the bytes that are reduced do not depend on it.
    """
    with ExitStack() as stack:
        stack.enter_context(communication_hook(all_reduce_bucket))
        # The logger times the first steps by a timer of the device, of which a CPU build has none for CUDA.
        stack.enter_context(mock.patch.object(reducer.Logger, "set_runtime_stats_and_log", lambda self: None))
        stack.enter_context(mock.patch.object(reducer.Reducer, "_rebuild_buckets", lambda self: False))
        yield
