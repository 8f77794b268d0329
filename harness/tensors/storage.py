"""The storages behind tensors, and their bytes, through DTensors and other subclasses."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a tensor's data on this rank: a DTensor's local one, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a DTensor's attributes include its mesh
            yield from plain_tensors(part)


class Storage(NamedTuple):
    """The memory behind a tensor; `identity` lasts as long as the storage, `address` until it is resized."""

    identity: int
    bytes: int
    address: int
    device: str  # cpu or cuda


def storages(tensor: Tensor) -> Iterator[Storage]:
    """Yield every storage behind a tensor."""
    for local in plain_tensors(tensor):
        if local.device.type != "meta" and local.layout == torch.strided:
            storage = local.untyped_storage()
            yield Storage(storage._cdata, storage.nbytes(), storage.data_ptr(), local.device.type)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors on this rank, padding included; freed ones count 0."""
    return sum({storage.identity: storage.bytes for tensor in tensors for storage in storages(tensor)}.values())


def element_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' own elements on this rank, each view once, without the rest of its storage."""
    view_bytes = {
        (local.untyped_storage()._cdata, local.storage_offset(), local.numel()): local.numel() * local.element_size()
        for tensor in tensors
        for local in plain_tensors(tensor)
    }
    return sum(view_bytes.values())
