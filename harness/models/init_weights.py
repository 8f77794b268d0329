"""Initial weights that are the same in every layout, and the part of them that a rank holds."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from harness.config.model import ModelConfig
from harness.models.quantized import filled_like

Box = tuple[tuple[int, int], ...]


def generator(seed: int, purpose: str, device: torch.device) -> torch.Generator:
    """Return a generator whose random numbers follow from the seed and a purpose alone."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_value(name: str, shape: torch.Size, model: ModelConfig, seed: int, device: torch.device) -> Tensor:
    """Return a parameter's whole initial value in fp32: a function of seed, name and shape, never of the layout.

    Both matrices of an adapter are drawn. peft begins with B = 0, where the gradient of A is 0 and proves nothing.
    """
    if len(shape) == 1:  # a norm's scale, or a bias
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
    value = torch.empty(shape, device=device)
    return value.normal_(0.0, model.initializer_range, generator=generator(seed, name, device))


def materialize(
    model: nn.Module,
    config: ModelConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    storage_device: torch.device | None = None,
    trained_dtype: torch.dtype | None = None,
) -> None:
    """Fill a model on the meta device, sharded or not, with one whole parameter in memory at a time.

    Values are computed on `device`, so that they are equal in every layout, and stored there or on `storage_device`.
    Trained parameters have `trained_dtype`, if it is given, and those that are filled already stay as they are.
    Tensors are swapped in place, so that tied weights stay tied and a wrapper's references stay valid.
    """
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:  # an engine's own layers have their values already
            continue
        whole = initial_value(name, parameter.shape, config, seed, device)
        width = trained_dtype if parameter.requires_grad and trained_dtype else dtype
        local = local_part_like(parameter, whole.to(width)).to(storage_device or device)
        torch.utils.swap_tensors(parameter, filled_like(parameter, local))  # type: ignore[no-untyped-call]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def local_part_like(template: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded as the template is and without communication."""
    if not isinstance(template, DTensor):
        return whole
    box = local_box(template)
    local = whole[tuple(slice(start, stop) for start, stop in box)].clone()
    own: Any = template.to_local()
    if hasattr(own, "fsdp_pre_all_gather"):  # torchao's part of a matrix that is gathered in float8
        local = type(own)(local, own._linear_mm_config, own._dtype)
    return DTensor.from_local(
        local,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def local_box(tensor: DTensor) -> Box:
    """Return the (start, stop) that this rank holds along every dimension of the whole tensor.

    torch's own function (compute_local_shape_and_global_offset) is wrong where a dimension that tensor-parallel ranks
    divide unevenly is divided once more: of 4,001 rows over 2 x 4 ranks it gives the last one 499, which has 500.
    """
    mesh, box = tensor.device_mesh, [(0, size) for size in tensor.shape]
    # A strided shard is a part of what the others leave.
    for axis, placement in sorted(enumerate(tensor.placements), key=lambda each: isinstance(each[1], _StridedShard)):
        if isinstance(placement, (Shard, _StridedShard)):
            start, stop = box[placement.dim]
            part = math.ceil((stop - start) / mesh.size(axis))
            first = min(start + mesh.get_local_rank(axis) * part, stop)
            box[placement.dim] = first, min(first + part, stop)
    return tuple(box)
