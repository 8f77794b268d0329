"""Groups of ranks that lie along several axes of the run's mesh: those that hold copies, those that hold shards."""

from collections.abc import Iterable

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from harness.layout.layout import Layout


def flattened_submesh(mesh: DeviceMesh, axes: Iterable[str]) -> DeviceMesh:
    """One dimension over all ranks along these axes, which are in the mesh's order."""
    first, *others = axes
    wide = tuple(axis for axis in (first, *others) if mesh[axis].size() > 1) or (first,)
    return mesh[wide[0]] if len(wide) == 1 else mesh[wide]._flatten()


def replica_group(mesh: DeviceMesh) -> ProcessGroup:
    """The ranks that have other tokens."""
    return flattened_submesh(mesh, ("dp_replicate", "dp_shard", "cp")).get_group()


def hsdp_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Two dimensions: the ranks that hold copies, and those that hold shards."""
    copies, shards = (flattened_submesh(mesh, axes) for axes in (layout.replica_axes, layout.sharding_axes))
    return DeviceMesh._concatenate([copies, shards])
