"""Activation offload: what decoder layers save for backward lies in the host's memory until backward uses it.

ZeRO-R's P_a+cpu and ZeRO-Infinity (arXiv 1910.02054, section 6.1; arXiv 2104.07857) offload only checkpoints. Here
every tensor that a layer saves is offloaded, which is only its input under full checkpointing. On a CPU the copies lie
in the same memory and do not reduce its use.

On CUDA copies run beside the computing, in two streams of their own. A layer's tensors stay on the device until the
next layer has run, and come back while the layer after theirs runs backward: so each direction holds one layer more.
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
from harness.tensors.storage import storage_identities

RebuildFn = Callable[[torch.UntypedStorage], Tensor]  # returns the view of a storage that was saved, of its subclass


def offload_activations(model: Decoder, probe: Probe) -> None:
    """Wrap the decoder layers in place, outside of their checkpointing; parameters keep their names."""
    hooks = OffloadHooks(probe)
    for block in model.layers_by_index().values():
        block.forward = functools.partial(hooks.wrap_forward, block, block.forward)  # type: ignore[method-assign,assignment]


class CopyStreams:
    """The streams of a CUDA device in which copies to and from the host run beside the computing."""

    def __init__(self, device: torch.device) -> None:
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy after all that was launched so far, and return the event of the copy's end."""
        stream = self.to_device if target.is_cuda else self.to_host
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the computing wait for a copy's end. Its memory may be used anew behind this."""
        torch.cuda.current_stream().wait_event(event)


class HostCopy:
    """A copy of a tensor's storage in the host's pinned memory; the autograd graph keeps it alive.

    With streams, the source stays alive until release(), and fetch() may begin the way back before restore().
    """

    __slots__ = (
        *("__weakref__", "arriving", "before", "device", "fetched", "host", "layer", "leaving", "source", "streams"),
        "version",
    )

    @torch.no_grad()
    def __init__(self, tensor: Tensor, streams: CopyStreams | None, layer: "Copies", before: "Copies") -> None:
        self.device, self.streams, self.layer, self.before = tensor.device, streams, layer, before
        self.leaving: tuple[Tensor, Any] | None = None  # the source, and the event of its copy to the host
        self.arriving: tuple[Tensor, Any] | None = None  # the copy on the device, and the event of its arrival
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=whole.is_cuda)
        if streams is None:
            self.host.copy_(whole, non_blocking=True)
        else:
            self.leaving = whole, streams.copy(self.host, whole)
        # The weak reference prevents the storage's identity from being reused.
        self.source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = tensor._version
        self.fetched: StorageWeakRef | None = None

    def release(self) -> None:
        """Let go of the source once it is on the host."""
        if self.streams is not None and self.leaving is not None:
            self.streams.wait(self.leaving[1])
            self.leaving = None

    @torch.no_grad()
    def fetch(self) -> None:
        """Begin to copy the storage back to the device, unless it is there or on its way."""
        self.release()
        if self.streams is not None and self.arriving is None and self._present() is None:
            whole = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
            self.arriving = whole, self.streams.copy(whole, self.host)

    def restore(self, host: Tensor) -> torch.UntypedStorage:
        """Return the storage on the device, copied back once for all tensors that use it at the same time."""
        self.fetch()
        present = self._present()
        if present is not None:
            return present
        if self.streams is not None and self.arriving is not None:
            (whole, event), self.arriving = self.arriving, None
            self.streams.wait(event)
        else:
            whole = host.to(self.device, non_blocking=True)
        storage = whole.untyped_storage()
        self.fetched = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return storage

    def _present(self) -> torch.UntypedStorage | None:
        """Return the storage that restore() returned before, if something still uses it."""
        if self.fetched is None:
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self.fetched.cdata) or None  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if self.streams is not None:
            for _, event in filter(None, (self.leaving, self.arriving)):  # the memory of both may be used anew
                self.streams.wait(event)


Copies = weakref.WeakSet[HostCopy]  # those of one call of a layer


class SavedTensor(NamedTuple):
    """A tensor saved for backward, as a view into a copied storage; `packed` is what the outer pack hook returned."""

    copy: HostCopy
    packed: Any
    rebuild: RebuildFn


class OffloadHooks:
    """Saved-tensor hooks that compose with outer hooks, such as those that measure; each storage is copied once.

    Weights stay on the device. Whole storages are copied, because a saved view keeps its whole storage alive.
    """

    def __init__(self, probe: Probe, streams: CopyStreams | None = None) -> None:
        self.probe = probe
        self.copies: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()
        self.streams = streams  # created with the first copy from a CUDA device
        self.layer, self.before = Copies(), Copies()  # of the present call of a layer, and of the one before it

    def wrap_forward(self, block: nn.Module, forward: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Run a layer's forward so that what it saves goes to the host."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_identity, _identity)
        self.before, self.layer = self.layer, Copies()
        with saved_tensors_hooks(functools.partial(self.pack, block, outer[0]), functools.partial(unpack, outer[1])):
            output = forward(*arguments)
        release(self.before)
        return output

    def pack(self, block: nn.Module, outer_pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """Copy a tensor that is saved for backward to the host, unless it is a weight of the layer."""
        weights = (*block.parameters(), *block.buffers())  # looked up each time: sharded engines gather and swap them
        if {*storage_identities(tensor)} <= {identity for weight in weights for identity in storage_identities(weight)}:
            return outer_pack(tensor)
        local, rebuild = to_plain_tensor(tensor)
        copy = self.copy_once(local)
        return SavedTensor(copy, outer_pack(copy.host), rebuild)

    def copy_once(self, tensor: Tensor) -> HostCopy:
        """Return the host copy of a tensor's storage, created now unless one has the tensor's current values."""
        key = tensor.untyped_storage()._cdata
        copy = self.copies.get(key)
        if copy is None or copy.source.expired() or copy.version != tensor._version:  # type: ignore[no-untyped-call]
            if tensor.is_cuda and self.streams is None:
                self.streams = CopyStreams(tensor.device)
            copy = self.copies[key] = HostCopy(tensor, self.streams, self.layer, self.before)
            self.layer.add(copy)
            self.probe.offloaded(copy.host)
        return copy


def release(copies: Copies) -> None:
    """Let go of all sources that are on the device for the copies' sake alone."""
    for copy in copies:
        copy.release()


def unpack(outer_unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
    """Return a saved tensor, copied back to the device, and begin to bring back what the next backward needs."""
    if not isinstance(saved, SavedTensor):
        return outer_unpack(saved)
    release(saved.copy.layer)
    storage = saved.copy.restore(outer_unpack(saved.packed))
    while saved.copy.before:
        saved.copy.before.pop().fetch()
    return saved.rebuild(storage)


def to_plain_tensor(tensor: Tensor) -> tuple[Tensor, RebuildFn]:
    """Return the plain tensor with this rank's data of a tensor, and a function that rebuilds the tensor on a storage.

    The function keeps no reference to the tensor.
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        return to_plain_tensor(tensor.wait())  # type: ignore[no-untyped-call]  # its collective may still run
    if not is_traceable_wrapper_subclass(tensor):
        place = (int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return tensor, functools.partial(view_of_storage, tensor.dtype, tensor.device, place)
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    (inner,) = (name for name, part in parts.items() if isinstance(part, Tensor))
    local, rebuild_inner = to_plain_tensor(parts.pop(inner))
    kind, shape, stride = type(tensor), tensor.shape, tensor.stride()

    def rebuild(storage: torch.UntypedStorage) -> Tensor:
        rebuilt: Tensor = kind.__tensor_unflatten__(parts | {inner: rebuild_inner(storage)}, context, shape, stride)
        return rebuilt

    return local, rebuild


def view_of_storage(dtype: torch.dtype, device: torch.device, place: Any, storage: torch.UntypedStorage) -> Tensor:
    """Return the plain tensor with this offset, shape and stride in a storage."""
    return torch.empty(0, dtype=dtype, device=device).set_(storage, *place)


def _identity(value: Any) -> Any:
    return value
