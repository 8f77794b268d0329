"""The process groups of a run: they bind no device and outlast the harness's own time limits."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.strategy import AXES
from harness.records.run_folder import RunSpec

MARGIN_SECONDS = 120.0  # from the end of a run's time to the end of its collectives' time

MAX_TIMEOUT_SECONDS = 30 * 24 * 3600.0  # C++ adds a timeout to a clock, which an infinite one would overflow

# A function that returns a context in which a rank has joined the others, such as process_group.
JoinRanks = Callable[[RunSpec], AbstractContextManager[tuple[DeviceMesh, torch.device]]]


@contextmanager
def process_group(spec: RunSpec) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Join the other ranks. Yield a mesh with every axis, in the order of AXES, and this rank's device.

    No device is bound to the group (`device_id` of init_process_group). In torch 2.13 a bound device makes the group,
    and all groups that are split from it, connect eagerly, and then single sends and receives, which are what a
    pipeline's schedule issues, wait for each other in one stream (ProcessGroupNCCL.cpp, pointToPoint). DeviceMesh would
    also split gloo's groups with NCCL's options where a run has both (device_mesh.py, _init_one_process_group). A group
    without a bound device connects at its first collective, here a barrier, so that NCCL allocates its buffers before
    the model takes the memory.
    """
    device, backend = prepare_device(spec), "gloo"
    if device.type == "cuda":  # offloaded gradients are summed on the host, which needs gloo
        backend = "cpu:gloo,cuda:nccl" if spec.layout.offloaded_state else "nccl"
    timeout = collective_timeout(spec.timeout_seconds)
    set_default_timeout(timeout)
    dist.init_process_group(backend, timeout=timeout)
    mesh = init_device_mesh(spec.device, spec.layout.mesh_shape, mesh_dim_names=AXES)
    wait_for_ranks(device)
    yield mesh, device
    dist.destroy_process_group()  # only after success: a failed rank must not wait for the others


def prepare_device(spec: RunSpec) -> torch.device:
    """Make this rank's device the current one and set how it computes, and return it."""
    torch.set_num_threads(spec.threads)
    torch.set_float32_matmul_precision("highest")  # some containers turn TF32 on, which is not fp32
    if spec.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def collective_timeout(timeout_seconds: float) -> timedelta:
    """Return how long a collective may wait: longer than the run may take, so that never torch ends a run.

    The parent ends a run that makes no progress for hang_seconds, and any run after timeout_seconds.
    """
    return timedelta(seconds=min(timeout_seconds, MAX_TIMEOUT_SECONDS) + MARGIN_SECONDS)


def set_default_timeout(timeout: timedelta) -> None:
    """Set the timeout of groups that are created without one, as those of meshes and of DeepSpeed are.

    They do not inherit the default group's: torch takes 10 minutes for NCCL and 30 for gloo from these two globals
    (distributed_c10d.py, _get_default_timeout).
    """
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]


def wait_for_ranks(device: torch.device) -> None:
    """Wait until all ranks are here, and until their devices have finished what was launched before.

    With a device named, NCCL waits. Without, torch would choose gloo where a run has both, which knows no devices.
    """
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def wait_for_device(device: torch.device) -> None:
    """Wait until this rank's device has finished what was launched before; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
