"""Activation offload: what decoder layers keep for backward lies in the host's memory until backward asks for it.

ZeRO-R's P_a+cpu and ZeRO-Infinity (arXiv 1910.02054, section 6.1; arXiv 2104.07857) do so with checkpoints; here it is
whatever a layer keeps, under full checkpointing its input. On a CPU the copies lie in the same memory and save nothing.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.models.decoder import Decoder
from harness.probe import Probe
from harness.tensors.storage import storages

RebuildFn = Callable[[Tensor], Tensor]  # from a plain tensor to the subclass it came out of


def offload_activations(model: Decoder, probe: Probe) -> None:
    """Wraps the blocks of `model.layers` in place, outside of what checkpoints them; names of parameters stay."""
    copies = OffloadHooks(probe)
    for block in model.layers_by_index().values():
        block.forward = functools.partial(copies.wrap_forward, block, block.forward)  # type: ignore[method-assign,assignment]


class HostCopy:
    """The bytes of a tensor's storage on the host, pinned; the graph keeps it alive."""

    __slots__ = ("__weakref__", "device", "fetched", "host", "source", "version")

    @torch.no_grad()
    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=whole.is_cuda)
        self.host.copy_(whole, non_blocking=True)
        # While it is held no other storage is taken for it.
        self.source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = tensor._version
        self.fetched: StorageWeakRef | None = None

    def matches(self, tensor: Tensor) -> bool:
        return not self.source.expired() and self.version == tensor._version  # type: ignore[no-untyped-call]

    def restore(self, host: Tensor) -> torch.UntypedStorage:
        """Copied back once for all that use it at the same time."""
        there = self.fetched and torch.UntypedStorage._new_with_weak_ptr(self.fetched.cdata)  # type: ignore[attr-defined]
        if not there:
            there = host.to(self.device, non_blocking=True).untyped_storage()
            self.fetched = StorageWeakRef(there)  # type: ignore[no-untyped-call]
        storage: torch.UntypedStorage = there
        return storage


class SavedTensor(NamedTuple):
    """A tensor kept for backward: its place in a copied storage, which `kept` holds in the form of outer hooks."""

    copy: HostCopy
    packed: Any
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    rebuild: RebuildFn


class OffloadHooks:
    """Hooks for saved tensors, composed with those of whoever looks on; a storage that is saved twice is copied once.

    Weights are left where they are. Whole storages are copied, as it is them that a saved view keeps alive.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.copies: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()

    def wrap_forward(self, block: nn.Module, forward: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """The block's forward; what it saves goes to the host."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_identity, _identity)
        with saved_tensors_hooks(functools.partial(self.pack, block, outer[0]), functools.partial(unpack, outer[1])):
            return forward(*arguments)

    def pack(self, block: nn.Module, outer_pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        weights = (*block.parameters(), *block.buffers())  # at this moment: sharded engines gather and swap them
        if {found.identity for found in storages(tensor)} <= {found.identity for w in weights for found in storages(w)}:
            return outer_pack(tensor)
        local, rebuild = to_plain_tensor(tensor)
        copy = self.copy_once(local)
        offset = int(local.storage_offset())
        return SavedTensor(copy, outer_pack(copy.host), local.dtype, offset, local.shape, local.stride(), rebuild)

    def copy_once(self, tensor: Tensor) -> HostCopy:
        key = tensor.untyped_storage()._cdata
        copy = self.copies.get(key)
        if copy is None or not copy.matches(tensor):
            copy = self.copies[key] = HostCopy(tensor)
            self.probe.offloaded(copy.host)
        return copy


def unpack(outer_unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
    if not isinstance(saved, SavedTensor):
        return outer_unpack(saved)
    storage = saved.copy.restore(outer_unpack(saved.packed))
    local = torch.empty(0, dtype=saved.dtype, device=saved.copy.device)
    local.set_(storage, saved.offset, saved.shape, saved.stride)  # type: ignore[call-overload]
    return saved.rebuild(local)


def to_plain_tensor(tensor: Tensor) -> tuple[Tensor, RebuildFn]:
    """The plain tensor that holds the data of one on this rank, and the way back. Keeps nothing of the tensor."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return to_plain_tensor(tensor.wait())  # type: ignore[no-untyped-call]  # its data may be on the way
    if not is_traceable_wrapper_subclass(tensor):
        return tensor, _identity
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    (inner,) = (name for name, part in parts.items() if isinstance(part, Tensor))
    local, rebuild_inner = to_plain_tensor(parts.pop(inner))
    kind, shape, stride = type(tensor), tensor.shape, tensor.stride()

    def rebuild(data: Tensor) -> Tensor:
        found: Tensor = kind.__tensor_unflatten__(parts | {inner: rebuild_inner(data)}, context, shape, stride)
        return found

    return local, rebuild


def _identity(value: Any) -> Any:
    return value
