"""Machines as values that need no device: the one at hand, or a node of a cluster that the configuration describes.

Peak FLOP/s of devices are known by the exact name that CUDA reports; harness/config/devices.toml has them.
"""

import ctypes
import dataclasses
import importlib.util
import os
import platform
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import yaml

from harness.config.devices import datasheets
from harness.config.from_dict import from_dict
from harness.config.hardware import HardwareConfig
from harness.config.locations import files_in
from harness.config.schema import ClusterConfig, Device
from harness.util.text import UserError

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


@cache
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
    versions = _torch_versions()
    return versions is None or versions.get("cuda") is not None or versions.get("hip") is not None


def lacks_driver() -> bool:
    """Return whether the installed torch is a build for CUDA, and the driver's library that it loads is not there."""
    versions = _torch_versions()
    if sys.platform != "linux" or versions is None or versions.get("cuda") is None:
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def _torch_versions() -> dict[str, Any] | None:
    """Return what torch's file says of its build without importing torch; None where importing says what is wrong."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


@cache
def torch_release() -> tuple[int, int]:
    """Return the first two numbers of the installed torch's version."""
    major, minor, *_ = version("torch").split(".")
    return int(major), int(minor)


@dataclass(frozen=True)
class DescribedCluster:
    """The nodes and devices of a cluster, as its file describes them."""

    name: str
    nodes: int
    gpus_per_node: int
    hardware: HardwareConfig
    device: Device

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return self.nodes * self.gpus_per_node

    @cached_property
    def memory_bytes(self) -> int:
        """The bytes of one device, or an equal share of a machine whose ranks compute on its CPU."""
        return self.hardware.memory_bytes // (self.gpus_per_node if self.hardware.is_cpu else 1)

    def with_ranks(self, ranks: int) -> "DescribedCluster":
        """Return the cluster with as many nodes as so many ranks need."""
        return dataclasses.replace(self, nodes=-(-ranks // self.gpus_per_node))

    def world_size_problem(self, ranks: int) -> str | None:
        """Return why the cluster has too few devices for so many ranks, or None."""
        if ranks <= self.world_size:
            return None
        return (
            f"world_size={ranks} is more than the {self.world_size} devices of cluster={self.name}: choose"
            f" cluster.nodes={self.with_ranks(ranks).nodes}, or fewer ranks"
        )


def described_cluster(cluster: ClusterConfig) -> DescribedCluster:
    """Return the cluster of a configuration. Raises UserError if its hardware is not known."""
    hardware = cluster.hardware
    if hardware is None:
        known = [name for name in files_in("cluster") if name not in ("local", "slurm")]
        choice = f"choose {', '.join(f'cluster={name}' for name in known)}" if known else "give cluster.hardware"
        raise UserError(
            f"cluster={cluster.name} has no cluster.hardware, from which plans and simulations take their figures:"
            f" {choice}"
        )
    if cluster.gpus_per_node is None:
        raise UserError(f"cluster.gpus_per_node=null of cluster={cluster.name}: give the number of devices of a node")
    device: Device = "cpu" if hardware.device_name.startswith("cpu") else "cuda"
    return DescribedCluster(cluster.name, cluster.nodes, cluster.gpus_per_node, hardware, device)


@cache
def described_machine(cluster: DescribedCluster) -> Machine:
    """Return one node of the cluster as a machine whose devices are free."""
    name, count = cluster.hardware.device_name, cluster.gpus_per_node
    return Machine(
        device=cluster.device,
        device_name=name,
        nodes=cluster.nodes,
        ranks_per_node=count,
        devices=count if cluster.device == "cuda" else 0,
        free_bytes=(cluster.memory_bytes,) * count,
        cores=2 * count,
        device_bytes=cluster.memory_bytes,
        device_names=(name,) * count if cluster.device == "cuda" else (),
    )


def run_hardware(machine: Machine, cluster: ClusterConfig, nodes: int) -> HardwareConfig | None:
    """Return the hardware of a run: that of the cluster's own file, or of a file that describes this machine.

    The latter is for one node, because all that its nodes may differ in is what connects them.
    """
    return machine_hardware(machine) if cluster.hardware is None and nodes == 1 else cluster.hardware


def machine_hardware(machine: Machine) -> HardwareConfig | None:
    """Return the hardware of this machine's device, None where no file in conf/cluster describes it.

    A file that `harness calibrate` wrote counts before the others, and that of a CPU on its own processor alone.
    """
    for hardware in hardware_in_files():
        is_same_host = (hardware.processor, hardware.cores) == (processor_name(), machine.cores)
        is_same = hardware.device_name == machine.device_name and (is_same_host or machine.device != "cpu")
        if hardware.calibrated and is_same:
            return hardware
    return described_devices().get(machine.device_name)


def described_devices() -> Mapping[str, HardwareConfig]:
    """Return the hardware in the files of conf/cluster by the name of its device; of several files the first counts.

    Calibrated ones are left out: they are of one machine.
    """
    return {hardware.device_name: hardware for hardware in reversed(hardware_in_files()) if not hardware.calibrated}


@cache
def hardware_in_files() -> Sequence[HardwareConfig]:
    """Return the hardware of every file in conf/cluster, in the order of their names.

    A file with a mistake is left out, because it need not be that of the run.
    """
    described: list[HardwareConfig] = []
    for path in files_in("cluster").values():
        with suppress(yaml.YAMLError, AttributeError, UserError):
            values = (yaml.safe_load(path.read_text()) or {}).get("hardware")
            described += [from_dict(HardwareConfig, values, "cluster.hardware")] if values else []
    return described


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one device in a dtype by torch's name, or None if this exact device is unknown.

    Drivers before 470 leave out the maker of the newer boards: A100-SXM4-40GB.
    """
    sheet = datasheets().get(device_name) or datasheets().get(f"NVIDIA {device_name}") or {"flops": {}}
    known: dict[str, float] = sheet["flops"]
    return known.get(dtype)


def assumed_peak(machine: Machine, dtype: str) -> tuple[float | None, str]:
    """Return the peak of a machine's device, and whose it is; if its name is unknown, the slowest one of its kind.

    That foresees how long a run takes, and is no figure of a row. None where no device of the same compute capability
    is known.
    """
    known, capability = peak_flops(machine.device_name, dtype), ".".join(map(str, machine.compute_capability or ()))
    alike = [
        device["flops"][dtype]
        for device in datasheets().values()
        if device.get("capability") == capability and dtype in device["flops"]
    ]
    slowest = (min(alike, default=None), f"the slowest known device of compute capability {capability}")
    return slowest if known is None and alike else (known, machine.device_name)
