"""The machine of a run: the one at hand, without initializing a device of it, or the one that its cluster describes."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import psutil

from harness.config.from_dict import ConfigValues, from_dict
from harness.config.schema import ClusterConfig
from harness.hardware.cuda_devices import CudaDevice, find_cuda_devices, wait_for_release
from harness.hardware.machine import (
    CPU_RANKS,
    Machine,
    described_cluster,
    described_machine,
    is_built_for_gpus,
    usable_cores,
)
from harness.util.text import UserError, one_line


def machine_of_run(values: ConfigValues, detect: Callable[[ClusterConfig], Machine] | None = None) -> Machine:
    """Return the machine that composed values are for: the one at hand, which `detect` returns.

    A simulation is for the machine that its cluster describes, if it describes one. Raises UserError.
    """
    cluster = from_dict(ClusterConfig, values["cluster"], "cluster")
    if values.get("launch") == "simulated":
        return detect_machine(cluster) if cluster.hardware is None else described_machine(described_cluster(cluster))
    return (detect or detect_machine)(cluster)


def refresh_machine(machine: Machine, cluster: ClusterConfig) -> Machine:
    """Return the machine with the free memory and the devices that this process may use at this moment."""
    current = detect_machine(cluster)
    sharing = machine.sharing if machine.device == "cpu" else 1
    return replace(
        machine,
        free_bytes=tuple(size // sharing for size in current.free_bytes),
        devices=current.devices,
        device_names=current.device_names,
        host_free_bytes=current.host_free_bytes,
    )


def detect_machine(cluster: ClusterConfig) -> Machine:
    """Return this machine as one of the cluster's equal nodes.

    Raises UserError if the cluster wants a device that the machine does not have, if its devices cannot be used, or if
    Slurm gave GPUs to this job that a run on the CPU would leave idle.
    """
    count, is_rocm = count_gpus()
    cuda_devices: Sequence[CudaDevice] = ()
    if cluster.device != "cpu" and count:
        cuda_devices = find_cuda_devices(count, is_rocm)
    hardware, names = cluster.hardware, tuple(device.name for device in cuda_devices)
    if hardware is not None and hardware.device_name not in (names[:1] or ("cpu",)):
        raise UserError(
            f"cluster={cluster.name} has devices of the kind {hardware.device_name}, and this machine has"
            f" {names[0] if names else 'none'}: type harness plan with the same settings, or choose cluster=local"
        )
    if cluster.device == "cuda" and not cuda_devices:
        raise UserError("cluster.device=cuda needs a CUDA device and this machine has none: choose cpu or auto")
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if cluster.device == "auto" and not cuda_devices and gpus not in ("", "0"):
        raise UserError(
            f"cluster.device=auto would run on the CPU, although Slurm gave this job {gpus} GPUs: torch sees none of"
            " them. Install a build of torch for them, or choose cluster.device=cpu"
        )
    host_free_bytes = psutil.virtual_memory().available
    capabilities = [device.compute_capability for device in cuda_devices]
    return Machine(
        device="cuda" if cuda_devices else "cpu",
        device_name=names[0] if names else "cpu",
        nodes=cluster.nodes,
        ranks_per_node=cluster.gpus_per_node or len(cuda_devices) or CPU_RANKS,
        devices=len(cuda_devices) or count,
        free_bytes=tuple(device.free_bytes for device in cuda_devices) or (host_free_bytes,),
        cores=len(usable_cores()),
        host_free_bytes=host_free_bytes,
        device_bytes=min((device.total_bytes for device in cuda_devices), default=None),
        device_names=names,
        compute_capability=min((number for number in capabilities if number is not None), default=None),
    )


def count_gpus() -> tuple[int, bool]:
    """Return how many GPUs torch counts, and whether it is built for AMD's.

    A build for CPUs sees none, which its version tells without the second that importing it takes.
    """
    if "torch" not in sys.modules and not is_built_for_gpus():
        return 0, False
    import torch

    # Without NVML it asks CUDA, which initializes no device either.
    return torch.cuda.device_count(), torch.version.hip is not None


def release_problem(machine: Machine, cluster: ClusterConfig) -> str | None:
    """Wait until this machine's GPUs are as free as before a run; return why they are not, None if they are.

    `machine` has the free memory from before the run.
    """
    if machine.device != "cuda":
        return None
    try:
        return wait_for_release(machine.free_bytes, lambda: detect_machine(cluster).free_bytes)
    except UserError as error:  # a device was lost
        return one_line(error)
