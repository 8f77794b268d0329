"""A machine's ranks, devices, cores and free memory, as a value that needs no device."""

import functools
import importlib.util
import os
import platform
import re
import runpy
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from harness.config.schema import Device

CORES_PER_GPU_RANK = 2  # one for the rank's own thread, one for that of its backward

CPU_RANKS = 2  # ranks of a node without GPUs: the smallest world in which anything is parallel


@dataclass(frozen=True)
class Machine:
    """This machine as one node of the cluster. CPU ranks share its memory; a GPU rank has that of its device."""

    device: Device
    device_name: str
    nodes: int
    ranks_per_node: int
    devices: int  # the number of CUDA devices of this machine
    free_bytes: tuple[int, ...]  # free memory of the host (cpu), or of each device (cuda)
    cores: int
    host_free_bytes: int | None = None  # free memory of the host, whatever the device; None if unknown
    sharing: int = 1  # number of runs that share this machine's memory
    device_bytes: int | None = None  # total memory of the smallest CUDA device; None on a CPU
    device_names: tuple[str, ...] = ()  # of the CUDA devices, in the order of ranks; empty on a CPU
    compute_capability: tuple[int, int] | None = None  # the lowest of the CUDA devices'; None if unknown, or AMD's

    @property
    def world_size(self) -> int:
        """The number of ranks that all nodes run."""
        return self.nodes * self.ranks_per_node

    def available_bytes(self, ranks: int) -> int:
        """Return the free bytes of the host, or of the fullest device among those that `ranks` ranks use."""
        return min(self.free_bytes[:ranks])

    def nodes_needed(self, ranks: int) -> int:
        """Return the smallest number of nodes that can run `ranks` ranks."""
        return -(-ranks // self.ranks_per_node) if self.nodes > 1 else 1

    def world_size_problems(self, ranks: int) -> Iterator[str]:
        """Yield the reasons why this cluster cannot run `ranks` ranks."""
        nodes = self.nodes_needed(ranks)
        if nodes > self.nodes:
            yield (
                f"world_size={ranks} is more than cluster.nodes={self.nodes} x {self.ranks_per_node} ranks: choose"
                f" {self.world_size}"
            )
        elif ranks % nodes:
            yield f"world_size={ranks} does not spread evenly over {nodes} nodes: choose a multiple of {nodes}"

    def device_problem(self, devices: int) -> str | None:
        """Return why the first `devices` CUDA devices cannot run one training, None if they can."""
        names = tuple(dict.fromkeys(self.device_names[:devices]))
        if len(names) < 2:
            return None
        return (
            f"the run would use {' and '.join(names)}, which draw different random numbers and wait for the slowest:"
            " name devices of one model in CUDA_VISIBLE_DEVICES"
        )

    @property
    def fingerprint(self) -> str:
        """The text that distinguishes measurements of this machine from another's."""
        return self.device_name if self.device == "cuda" else f"cpu, {self.cores} cores, {platform.machine()}"


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def processor_name() -> str | None:
    """Return the processor model's name, None if it is unknown. On some architectures /proc/cpuinfo has none."""
    if platform.system() == "Darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.check_output(command, text=True, timeout=5).strip() or None
        return None
    if CPUINFO.exists():
        name = re.search("^model name.*?:(.*)$", CPUINFO.read_text(errors="replace"), re.MULTILINE)
        if name:
            return name[1].strip()
    return platform.processor() or None


def is_built_for_gpus() -> bool:
    """Return whether the installed torch is a build for GPUs, by the file that states its version."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True  # importing it says what is wrong
    versions = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return versions.get("cuda") is not None or versions.get("hip") is not None


def torch_release() -> tuple[int, int]:
    """Return the first two numbers of the installed torch's version."""
    major, minor, *_ = version("torch").split(".")
    return int(major), int(minor)
