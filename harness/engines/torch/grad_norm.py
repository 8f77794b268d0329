"""The gradient norm over everything a layout cuts, and clipping by it.

torch's own takes one mesh at a time and no plain tensors beside sharded ones; here each gradient counts once.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_axes(tensor: Tensor) -> dict[str, ProcessGroup]:
    """The mesh axes over which a tensor is cut, with their groups; those of one rank left out."""
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    return {
        name: mesh.get_group(dimension)
        for dimension, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True))
        # a dimension cut twice is a _StridedShard, which is no Shard
        if not placement.is_replicate() and mesh.size(dimension) > 1
    }


def squared_grad_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over all ranks that hold parts of these gradients, in fp32 on the device where they compute.

    A copy counts once.
    """
    cut: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    groups: dict[str, ProcessGroup] = {}
    for gradient in gradients:
        found = sharded_axes(gradient)
        groups |= found
        cut[tuple(found)].append(local_part(gradient))
    total = torch.zeros((), device=device)
    for axes in sorted(cut):
        norms = torch._foreach_norm(cut[axes], 2, torch.float32)
        square = torch.linalg.vector_norm(torch.stack(norms)).to(device) ** 2  # offloaded gradients lie on the host
        for axis in axes:
            dist.all_reduce(square, group=groups[axis])
        total += square
    return total


def clip_gradients(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales gradients in place so that their norm is at most so much."""
    local = [local_part(gradient) for gradient in gradients]
    torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(local[0].device))


def reduce_partial_grad(tensor: Tensor) -> Tensor:
    """A gradient of which every rank holds a summand, as it is for what sequence parallelism keeps whole: summed."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        return tensor.redistribute(placements=whole)
    return tensor
