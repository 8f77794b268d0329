"""Groups of ranks along several axes of the run's mesh: those that hold replicas and those that hold shards."""

from collections.abc import Iterable

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from harness.config.strategy import DATA_AXES
from harness.layout.layout import Layout


def flattened_submesh(mesh: DeviceMesh, axes: Iterable[str]) -> DeviceMesh:
    """Return a mesh of one dimension over all ranks along `axes`, which are named in the mesh's order."""
    first, *others = axes
    nontrivial = tuple(axis for axis in (first, *others) if mesh[axis].size() > 1) or (first,)
    return mesh[nontrivial[0]] if len(nontrivial) == 1 else mesh[nontrivial]._flatten()


def replica_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of ranks that hold the same parameters and process different tokens."""
    return flattened_submesh(mesh, DATA_AXES).get_group()


def hsdp_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Return a mesh of the ranks that hold replicas and those that hold shards, or of the latter alone.

    Shards without replicas have one dimension.
    """
    replicas, shards = (flattened_submesh(mesh, axes) for axes in (layout.replica_axes, layout.sharding_axes))
    return shards if replicas.size() == 1 and layout.zero_stage > 0 else DeviceMesh._concatenate([replicas, shards])
