"""The world of a virtual rank: collectives return at once, and what other ranks would send has finite values.

torch's fake process group fills the results of gathers, scatters and exchanges with what this rank contributes, and
leaves operands of all-reduces and broadcasts as they are. Nothing fills what is received from one other rank, as the
stages of a pipeline do (harness/simulator/virtual_stages.py). No result may be left as it was in memory: NaN would make
a loss scaler skip its steps, and subnormal numbers slow down kernels.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.futures import Future

from harness.config.strategy import AXES
from harness.records.run_spec import RunSpec
from harness.simulator.ddp_reducer import communication_hook, completed
from harness.simulator.process_group import fake_process_group
from harness.simulator.virtual_batches import own_tokens
from harness.simulator.virtual_deepspeed import agreeing_ranks
from harness.simulator.virtual_stages import lone_stages
from harness.worker.process_group import prepare_device


@contextmanager
def join_virtual_ranks(spec: RunSpec) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Return a context in which this process is one rank of a world; yield the mesh of the world, and its device."""
    device, layout, rank = prepare_device(spec), spec.layout, int(os.environ["RANK"])
    with ExitStack() as stack:
        for context in (
            own_tokens(spec.config.model.vocab_size, layout, rank),
            communication_hook(keep_bucket),
            lone_stages(),
            agreeing_ranks(layout, device),
            fake_process_group(rank, layout.world_size),
        ):
            stack.enter_context(context)
        yield init_device_mesh(spec.device, layout.mesh_shape, mesh_dim_names=AXES), device


def keep_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Return a bucket as the average over ranks that all have the gradients of this one, after its all-reduce."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    return completed(buffer)
