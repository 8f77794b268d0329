"""TODO harness.tensors.storage."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's data on this rank: of a DTensor its local one, of a plain one itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a DTensor names its mesh too
            yield from plain_tensors(part)


class Storage(NamedTuple):
    """What lies behind a tensor; the identity lasts as long as the storage, the address until it is resized."""

    identity: int
    bytes: int
    address: int
    device: str  # cpu or cuda


def storages(tensor: Tensor) -> Iterator[Storage]:
    """Every storage behind a tensor."""
    for local in plain_tensors(tensor):
        if local.device.type != "meta" and local.layout == torch.strided:
            storage = local.untyped_storage()
            yield Storage(storage._cdata, storage.nbytes(), storage.data_ptr(), local.device.type)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors on this rank, padding included; freed ones count 0."""
    return sum({found.identity: found.bytes for tensor in tensors for found in storages(tensor)}.values())


def element_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' own elements on this rank, each view once, not the buffers that they lie in."""
    found = {
        (local.untyped_storage()._cdata, local.storage_offset(), local.numel()): local.numel() * local.element_size()
        for tensor in tensors
        for local in plain_tensors(tensor)
    }
    return sum(found.values())
