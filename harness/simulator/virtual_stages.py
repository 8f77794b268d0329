"""The messages between stages of a virtual rank: none is sent, and those that would arrive have finite values."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from harness.simulator.pipeline_stages import pipeline_stages

RECEIVED_HIDDEN_STATE = 0.02  # of the size of an embedding's initial weights, which are what the first layer gets

RECEIVED_GRADIENT = 2.0**-10  # products of it are no subnormal numbers in float16, and sums over tokens do not overflow


class HeldMessages:
    """A handle of messages that keeps their tensors, as one of a real process group does.

    Gloo's keeps them until it is dropped, NCCL's until it was waited for.
    """

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self.works, self.tensors = works, [*tensors]

    def wait(self) -> None:
        """Wait for the messages, which takes no time."""
        for work in self.works:
            work.wait()
        if any(tensor.is_cuda for tensor in self.tensors):
            self.tensors.clear()


@contextmanager
def lone_stages() -> Iterator[None]:
    """Return a context in which pipeline stages run without the other ranks' stages."""
    create_forward, create_backward = PipelineStage.get_fwd_recv_ops, PipelineStage.get_bwd_recv_ops
    receive_forward = _filling(create_forward, RECEIVED_HIDDEN_STATE)
    receive_backward = _filling(create_backward, RECEIVED_GRADIENT)
    with ExitStack() as stack:
        for context in (
            pipeline_stages(),
            mock.patch.object(PipelineStage, "get_fwd_recv_ops", receive_forward),
            mock.patch.object(PipelineStage, "get_bwd_recv_ops", receive_backward),
            mock.patch.object(schedules, "_batch_p2p", _holding(schedules._batch_p2p)),
        ):
            stack.enter_context(context)
        yield


def _filling(create_receives: Callable[..., list[dist.P2POp]], size: float) -> Callable[..., list[dist.P2POp]]:
    """Return a function that creates the operations which receive a micro-batch, and fills their tensors."""

    def create_and_fill(stage: Any, micro_batch: int) -> list[dist.P2POp]:
        operations = create_receives(stage, micro_batch)
        for operation in operations:
            fill_received(operation.tensor, size)
        return operations

    return create_and_fill


def fill_received(tensor: Tensor, size: float) -> None:
    """Fill a tensor with numbers of one size and of alternating sign, whose mean is 0, in place of a message.

    Autograd does not see it, as it does not see a message.
    """
    values = tensor.data
    values[..., ::2] = size
    values[..., 1::2] = -size


def _holding(start: Callable[..., Sequence[Any]]) -> Callable[..., list[HeldMessages]]:
    """Return a function that starts a batch of messages and returns a handle that keeps their tensors."""

    def start_and_hold(operations: list[dist.P2POp], desc: str | None = None) -> list[HeldMessages]:
        return [HeldMessages(start(operations, desc), [operation.tensor for operation in operations])]

    return start_and_hold
