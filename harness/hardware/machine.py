"""What there is to run on, found without touching a device."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

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

    def nodes_needed(self, ranks: int) -> int:
        """On how many of the nodes so many ranks run: as few as can be."""
        return -(-ranks // self.ranks_per_node) if self.nodes > 1 else 1

    def world_size_problems(self, ranks: int) -> Iterator[str]:
        nodes = self.nodes_needed(ranks)
        if nodes > self.nodes:
            yield (
                f"world_size={ranks} is more than cluster.nodes={self.nodes} x {self.ranks_per_node} ranks: choose"
                f" {self.world_size}"
            )
        elif ranks % nodes:
            yield f"world_size={ranks} does not spread evenly over {nodes} nodes: choose a multiple of {nodes}"

    @property
    def fingerprint(self) -> str:
        """What tells its figures from another machine's."""
        return self.device_name if self.device == "cuda" else f"cpu, {self.cores} cores, {platform.machine()}"


def usable_cores() -> list[int]:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))
