"""A cluster that the configuration describes, no part of which need be at hand."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property

import yaml

from harness.config.from_dict import from_dict
from harness.config.hardware import HardwareConfig
from harness.config.locations import files_in
from harness.config.schema import ClusterConfig, Device
from harness.hardware.machine import Machine, processor_name
from harness.util.text import UserError


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
        nodes = -(-ranks // self.gpus_per_node)
        return (
            f"world_size={ranks} is more than the {self.world_size} devices of cluster={self.name}: choose"
            f" cluster.nodes={nodes}, or fewer ranks"
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
