"""The world of a virtual rank: collectives return at once, and what other ranks would send has finite values.

torch's fake process group fills the results of gathers, scatters and exchanges with what this rank contributes, and
leaves operands of all-reduces and broadcasts as they are. Nothing fills what is received from one other rank, which are
the hidden states and the gradients that pass between stages of a pipeline; they get values here. None may be left as it
was in memory: NaN would make a loss scaler skip its steps, and subnormal numbers slow down kernels.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.futures import Future

from harness.layout.layout import AXES
from harness.records.run_spec import RunSpec
from harness.simulator.ddp_reducer import communication_hook, completed
from harness.simulator.pipeline_stages import pipeline_stages
from harness.simulator.process_group import fake_process_group
from harness.simulator.virtual_deepspeed import agreeing_ranks
from harness.worker.process_group import prepare_device

RECEIVED_HIDDEN_STATE = 0.02  # of the size of an embedding's initial weights, which are what the first layer gets

RECEIVED_GRADIENT = 2.0**-14  # the smallest normal number in float16, so that sums over tokens do not overflow in it


@contextmanager
def join_virtual_ranks(spec: RunSpec) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Return a context in which this process is one rank of a world; yield the mesh of the world, and its device."""
    device = prepare_device(spec)
    with ExitStack() as stack:
        checks = agreeing_ranks(spec.layout, device)
        for context in (communication_hook(keep_bucket), pipeline_stages(), finite_receives(), checks):
            stack.enter_context(context)
        stack.enter_context(fake_process_group(int(os.environ["RANK"]), spec.layout.world_size))
        yield init_device_mesh(spec.device, spec.layout.mesh_shape, mesh_dim_names=AXES), device


def keep_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Return a bucket as the average over ranks that all have the gradients of this one, after its all-reduce."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    return completed(buffer)


@contextmanager
def finite_receives() -> Iterator[None]:
    """Return a context in which what pipeline stages receive has finite values of both signs."""

    def filling(create_receives: Callable[..., list[dist.P2POp]], size: float) -> Callable[..., list[dist.P2POp]]:
        def create_and_fill(stage: Any, micro_batch: int) -> list[dist.P2POp]:
            operations = create_receives(stage, micro_batch)
            for operation in operations:
                fill_received(operation.tensor, size)
            return operations

        return create_and_fill

    with (
        mock.patch.object(
            PipelineStage, "get_fwd_recv_ops", filling(PipelineStage.get_fwd_recv_ops, RECEIVED_HIDDEN_STATE)
        ),
        mock.patch.object(
            PipelineStage, "get_bwd_recv_ops", filling(PipelineStage.get_bwd_recv_ops, RECEIVED_GRADIENT)
        ),
    ):
        yield


def fill_received(tensor: Tensor, size: float) -> None:
    """Fill a tensor with numbers of one size and of alternating sign, whose mean is 0, in place of a message.

    Autograd does not see it, as it does not see a message.
    """
    values = tensor.data
    values[..., ::2] = size
    values[..., 1::2] = -size
