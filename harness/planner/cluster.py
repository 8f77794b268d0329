"""The cluster that a plan is for, and the rules of a run that hold on it without a machine at hand."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from harness.config.hardware import HardwareConfig
from harness.config.locations import conf_folders, names_in
from harness.config.schema import ClusterConfig, Device, RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.stack_memory import require_expressible
from harness.engines.base import EngineModule, load_engine, unsupported_elsewhere
from harness.hardware.machine import Machine
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout
from harness.util.errors import UserError


@dataclass(frozen=True)
class PlannedCluster:
    """The hardware that a plan is for; no part of it need be at hand."""

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

    def with_ranks(self, ranks: int) -> "PlannedCluster":
        """Return the cluster with as many nodes as so many ranks need."""
        return dataclasses.replace(self, nodes=-(-ranks // self.gpus_per_node))


def planned_cluster(cluster: ClusterConfig) -> PlannedCluster:
    """Return the cluster of a configuration. Raises UserError if its hardware is not known."""
    hardware = cluster.hardware
    if hardware is None:
        known = [name for name in names_in(conf_folders(), "cluster") if name not in ("local", "slurm")]
        choice = f"choose {', '.join(f'cluster={name}' for name in known)}" if known else "give cluster.hardware"
        raise UserError(
            f"cluster={cluster.name} has no cluster.hardware, from which a plan takes its figures: {choice}"
        )
    if cluster.gpus_per_node is None:
        raise UserError(f"cluster.gpus_per_node=null of cluster={cluster.name}: give the number of devices of a node")
    device: Device = "cpu" if hardware.device_name.startswith("cpu") else "cuda"
    return PlannedCluster(cluster.name, cluster.nodes, cluster.gpus_per_node, hardware, device)


def plan_problems(config: RunConfig, layout: Layout, cluster: PlannedCluster, stack: StackConfig) -> Iterator[str]:
    """Yield every reason why a configuration cannot run as this layout on this cluster, a line each.

    They are those of a run but for what depends on the machine at hand. The rules of an engine are those of the stack
    `harness` alone; another stack has its own.
    """
    yield from incompatibilities(config, layout)
    if layout.world_size > cluster.world_size:
        yield (
            f"world_size={layout.world_size} is more than the {cluster.world_size} devices of cluster={cluster.name}:"
            f" choose cluster.nodes={-(-layout.world_size // cluster.gpus_per_node)}, or fewer ranks"
        )
    yield from planned_machine(cluster).world_size_problems(layout.world_size)
    if stack.memory.kind != "harness":
        try:
            require_expressible(config, layout, stack)
        except UserError as error:
            yield str(error)
        return
    yield from unsupported_elsewhere(engine_module(layout.engine), config, layout, planned_machine(cluster))


@cache
def engine_module(name: str) -> EngineModule:
    """Return an engine's module, which is looked for once."""
    return load_engine(name)


@cache
def planned_machine(cluster: PlannedCluster) -> Machine:
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
