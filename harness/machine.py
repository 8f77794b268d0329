"""What there is to run on, found without touching a device."""

import dataclasses
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from harness.config import ClusterConfig
from harness.errors import UserError

CPU_RANKS = 2  # on a machine without GPUs: the smallest world in which anything is parallel


@dataclass(frozen=True)
class Machine:
    """This machine as one node of the cluster. Ranks on a CPU share its memory; on GPUs each has a device's."""

    device: str  # cpu | cuda
    device_name: str
    nodes: int
    ranks_per_node: int
    devices: int  # CUDA devices there are
    free_bytes: tuple[int, ...]  # of the host (cpu), or of every device (cuda)
    cores: int
    host_free_bytes: int | None = None  # of the host, whatever the device; None: not looked at
    sharing: int = 1  # runs that have this machine's memory between them
    device_bytes: int | None = None  # all memory of the smallest CUDA device; None on a CPU

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def available_bytes(self, ranks: int) -> int:
        """Of the host, or of the fullest device among those that so many ranks use."""
        return min(self.free_bytes[:ranks])

    def nodes_of(self, ranks: int) -> int:
        """On how many of the nodes so many ranks run: as few as can be."""
        return -(-ranks // self.ranks_per_node) if self.nodes > 1 else 1

    def refusals(self, ranks: int) -> Iterator[str]:
        nodes = self.nodes_of(ranks)
        if nodes > self.nodes:
            yield (
                f"world_size={ranks} is more than cluster.nodes={self.nodes} x {self.ranks_per_node} ranks: choose"
                f" {self.world_size}"
            )
        elif ranks % nodes:
            yield f"world_size={ranks} does not spread evenly over {nodes} nodes: choose a multiple of {nodes}"

    @property
    def kind(self) -> str:
        """What tells its figures from another machine's."""
        return self.device_name if self.device == "cuda" else f"cpu, {self.cores} cores, {platform.machine()}"


def as_it_is_now(machine: Machine, cluster: ClusterConfig) -> Machine:
    """The same with the memory and devices that this process may use at this moment."""
    now = look(cluster)
    shared = machine.sharing if machine.device == "cpu" else 1
    free_bytes = tuple(size // shared for size in now.free_bytes)
    return dataclasses.replace(machine, free_bytes=free_bytes, devices=now.devices, host_free_bytes=now.host_free_bytes)


def look(cluster: ClusterConfig) -> Machine:
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


def visible_devices(count: int) -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",")[:count] if listed else [str(index) for index in range(count)]


def nvml_handle(pynvml: "object", entry: str) -> object:
    by_index = entry.strip().isdigit()
    if by_index:
        return pynvml.nvmlDeviceGetHandleByIndex(int(entry))  # type: ignore[attr-defined]
    return pynvml.nvmlDeviceGetHandleByUUID(entry.strip())  # type: ignore[attr-defined]


def usable_cores() -> list[int]:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))
