"""This machine: the device, memory and cores that runs may use, determined without initializing a device."""

import dataclasses

import psutil

from harness.config.schema import ClusterConfig
from harness.hardware.machine import CPU_RANKS, Machine, usable_cores
from harness.hardware.nvml import NvmlError, visible_devices
from harness.util.errors import UserError


def refresh_machine(machine: Machine, cluster: ClusterConfig) -> Machine:
    """Return the machine with the free memory and the devices that this process may use at this moment."""
    current = detect_machine(cluster)
    sharing = machine.sharing if machine.device == "cpu" else 1
    return dataclasses.replace(
        machine,
        free_bytes=tuple(size // sharing for size in current.free_bytes),
        devices=current.devices,
        host_free_bytes=current.host_free_bytes,
    )


def detect_machine(cluster: ClusterConfig) -> Machine:
    """Return this machine as one of the cluster's equal nodes.

    Raises UserError if the cluster wants a device that the machine does not have.
    """
    free_bytes, total_bytes, name = _cuda_devices()
    devices = len(free_bytes)
    device = ("cuda" if devices else "cpu") if cluster.device == "auto" else cluster.device
    if device == "cuda" and not devices:
        raise UserError("cluster.device=cuda needs a CUDA device and this machine has none: choose cpu or auto")
    on_gpu = device == "cuda"
    return Machine(
        device=device,
        device_name=name if on_gpu else "cpu",
        nodes=cluster.nodes,
        ranks_per_node=cluster.gpus_per_node or (devices if on_gpu else CPU_RANKS),
        devices=devices,
        free_bytes=tuple(free_bytes) if on_gpu else (psutil.virtual_memory().available,),
        cores=len(usable_cores()),
        host_free_bytes=psutil.virtual_memory().available,
        device_bytes=min(total_bytes) if on_gpu else None,
    )


def _cuda_devices() -> tuple[list[int], list[int], str]:
    """Return the free and the total bytes of every visible device, and the name of the first.

    They come from NVML, as torch would have to initialize the devices to know them.
    """
    import torch

    count = torch.cuda.device_count()  # it queries NVML and initializes nothing
    if not count:
        return [], [], ""
    try:
        nvml_devices = visible_devices(count)
        memories = [device.memory_bytes() for device in nvml_devices]
    except NvmlError as error:
        raise UserError(
            f"torch sees {count} CUDA devices, but NVML reports: {error}; cluster.device=cpu runs without them"
        ) from None
    return [free for free, _ in memories], [total for _, total in memories], str(nvml_devices[0].name())
