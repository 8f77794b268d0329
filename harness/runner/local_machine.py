"""TODO harness.runner.local_machine."""

import dataclasses

import psutil

from harness.config.schema import ClusterConfig
from harness.hardware.machine import CPU_RANKS, Machine, usable_cores
from harness.hardware.nvml import nvml_handle, visible_devices
from harness.util.errors import UserError


def refresh_machine(machine: Machine, cluster: ClusterConfig) -> Machine:
    """The same with the memory and devices that this process may use at this moment."""
    now = detect_machine(cluster)
    shared = machine.sharing if machine.device == "cpu" else 1
    free_bytes = tuple(size // shared for size in now.free_bytes)
    return dataclasses.replace(machine, free_bytes=free_bytes, devices=now.devices, host_free_bytes=now.host_free_bytes)


def detect_machine(cluster: ClusterConfig) -> Machine:
    """This machine, as one of the cluster's equal nodes. Raises UserError if the cluster asks for what it is not."""
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
    """Free and all bytes of every visible device, and their name, from NVML: torch would have to touch them."""
    import torch

    count = torch.cuda.device_count()  # asks NVML, initialises nothing
    if not count:
        return [], [], ""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise UserError(
            f"torch sees {count} devices, of which NVML says: {error}; cluster.device=cpu leaves them"
        ) from None
    handles = [nvml_handle(pynvml, entry) for entry in visible_devices(count)]
    name = pynvml.nvmlDeviceGetName(handles[0])
    found = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
    return [int(memory.free) for memory in found], [int(memory.total) for memory in found], str(name)
