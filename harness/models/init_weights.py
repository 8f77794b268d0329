"""Initial weights that are the same in every layout, and the part of them that a rank holds."""

import hashlib
from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.config.model import ModelConfig

Box = tuple[tuple[int, int], ...]

# The boxes of every mesh's tensors, by shape and placements: torch takes 0.1 ms for one.
_BOXES: WeakKeyDictionary[DeviceMesh, dict[Hashable, Box]] = WeakKeyDictionary()


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
) -> None:
    """Fill a model on the meta device, sharded or not, with one whole parameter in memory at a time.

    Values are computed on `device`, so that they are equal in every layout, and stored there or on `storage_device`.
    Tensors are swapped in place, so that tied weights stay tied and a wrapper's references stay valid.
    """
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:  # an engine's own layers have their values already
            continue
        whole = initial_value(name, parameter.shape, config, seed, device)
        local = local_part_like(parameter, whole.to(dtype)).to(storage_device or device)
        filled = nn.Parameter(local, parameter.requires_grad)
        torch.utils.swap_tensors(parameter, filled)  # type: ignore[no-untyped-call]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def local_part_like(template: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded as the template is and without communication."""
    if not isinstance(template, DTensor):
        return whole
    box = local_box(template)
    local = whole[tuple(slice(start, stop) for start, stop in box)].clone()
    return DTensor.from_local(
        local,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def forget_boxes() -> None:
    """Forget the boxes of all meshes: one that equals another may belong to another rank of a simulation."""
    _BOXES.clear()


def local_box(tensor: DTensor) -> Box:
    """Return the (start, stop) that this rank holds along every dimension of the whole tensor."""
    boxes, key = _BOXES.setdefault(tensor.device_mesh, {}), (tensor.shape, tensor.placements)
    if key not in boxes:
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        boxes[key] = tuple((start, start + size) for size, start in zip(sizes, offsets, strict=True))
    return boxes[key]
