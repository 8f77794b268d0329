"""The global gradient norm over whatever a layout shards, and clipping by it.

torch.nn.utils.clip_grad_norm_ takes gradients of one mesh at a time and no plain tensors beside sharded ones. Here each
element of a gradient counts once.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_axes(tensor: Tensor) -> dict[str, ProcessGroup]:
    """Return the mesh axes of more than one rank over which a tensor is sharded, with their groups."""
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    return {
        name: mesh.get_group(dimension)
        for dimension, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True))
        # The test is not "is a Shard", because a dimension that is sharded twice is a _StridedShard, which is no Shard.
        if not placement.is_replicate() and mesh.size(dimension) > 1
    }


def squared_grad_norm(gradients: Sequence[Tensor], squares: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the fp32 sum of squares over all ranks that hold parts of these gradients, on `device`.

    `squares` has the sum of squares of this rank's part of each. A replicated gradient counts once.
    """
    by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    groups: dict[str, ProcessGroup] = {}
    for gradient, square in zip(gradients, squares, strict=True):
        axis_groups = sharded_axes(gradient)
        groups |= axis_groups
        by_axes[tuple(axis_groups)].append(square)
    total = torch.zeros((), device=device)
    for axes in sorted(by_axes):
        of_axes = torch.stack(by_axes[axes]).sum().to(device, torch.float32)  # offloaded gradients lie on the host
        for axis in axes:
            dist.all_reduce(of_axes, group=groups[axis])
        total += of_axes
    return total


def clip_gradients(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm, which is `norm`, becomes at most `max_norm`."""
    local = [local_part(gradient) for gradient in gradients]
    torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(local[0].device))


def reduce_partial_grad(tensor: Tensor) -> Tensor:
    """Return a gradient with its Partial placements summed over their ranks.

    Gradients are partial sums for parameters that sequence parallelism replicates.
    """
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        reduced = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        return tensor.redistribute(placements=reduced)
    return tensor
