"""The storages behind tensors, and their bytes, through DTensors and other subclasses."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN_TYPES = (Tensor, nn.Parameter)  # checked first, because a profiled step checks very often


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a tensor's data on this rank: a DTensor's local one, or the tensor itself."""
    if type(tensor) in PLAIN_TYPES or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        yield from scales(getattr(tensor, "quant_state", None))
        return
    if isinstance(local := getattr(tensor, "_local_tensor", None), Tensor):  # a DTensor's
        yield from plain_tensors(local)
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):
            yield from plain_tensors(part)


def scales(state: Any) -> Iterator[Tensor]:
    """Yield what bitsandbytes has beside the packed values of a matrix: scales, scales of these, and tables."""
    if state is not None:
        yield from (part for part in (state.absmax, state.code, state.offset) if part is not None)
        yield from scales(state.state2)


def plain_values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that is stored as codes, in fp32, or another tensor itself."""
    if getattr(tensor, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(tensor.data, tensor.quant_state)  # type: ignore[attr-defined, no-any-return]
    dequantize = getattr(tensor, "dequantize", None) if is_traceable_wrapper_subclass(tensor) else None
    return tensor if dequantize is None else dequantize()


def stored_dtype(tensor: Tensor) -> str:
    """Return torch's name of the dtype in which a tensor's values are stored: that of codes, where it has these."""
    return str(next(plain_tensors(tensor)).dtype).removeprefix("torch.")


class Storage(NamedTuple):
    """The memory behind a tensor; `identity` lasts as long as the storage, `address` until it is resized."""

    identity: int
    bytes: int
    address: int
    device: str  # cpu or cuda


def _stored_tensors(tensor: Tensor) -> Sequence[Tensor]:
    """Return the plain tensors behind a tensor that have memory."""
    local = tensor if type(tensor) in PLAIN_TYPES else getattr(tensor, "_local_tensor", tensor)  # a DTensor's
    if type(local) in PLAIN_TYPES:
        return () if local.is_meta or local.layout is not torch.strided else (local,)
    return [plain for plain in plain_tensors(local) if not plain.is_meta and plain.layout is torch.strided]


def storages(tensor: Tensor) -> list[Storage]:
    """Return every storage behind a tensor."""
    return [_storage(local) for local in _stored_tensors(tensor)]


def _storage(tensor: Tensor) -> Storage:
    storage = tensor.untyped_storage()
    return Storage(storage._cdata, storage.nbytes(), storage.data_ptr(), tensor.device.type)


def storage_addresses(tensors: Iterable[Tensor], device: str) -> list[int]:
    """Return the address of every storage behind tensors that lies on a kind of device, such as cpu or cuda."""
    return [
        plain.untyped_storage().data_ptr()
        for tensor in tensors
        for plain in _stored_tensors(tensor)
        if plain.device.type == device
    ]


def storage_identities(tensor: Tensor) -> list[int]:
    """Return the identities of all storages behind a tensor."""
    return [local.untyped_storage()._cdata for local in _stored_tensors(tensor)]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors on this rank, padding included; freed ones count 0."""
    return sum({storage.identity: storage.bytes for tensor in tensors for storage in storages(tensor)}.values())


def element_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' own elements on this rank, each view once, without the rest of its storage."""
    view_bytes = {
        (local.untyped_storage()._cdata, local.storage_offset(), local.numel()): local.nbytes
        for tensor in tensors
        for local in plain_tensors(tensor)
    }
    return sum(view_bytes.values())
