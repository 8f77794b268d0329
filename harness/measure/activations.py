"""The bytes that autograd saves for backward, by distinct storages, without those of weights and buffers."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from harness.tensors.storage import PLAIN_TYPES, Storage, plain_tensors, storage_identities, storages

# A function that gets the address of a storage, and whether it is saved for backward from now on or no longer.
SavedCallback = Callable[[int, bool], None]


class _SavedHandle:
    """A handle on a saved tensor, which lives as long as autograd keeps it and then releases the tensor's storages.

    It holds a detached tensor, because the tensor itself may be the output of the very node that holds this handle.
    """

    __slots__ = ("meter", "saved_storages", "tensor", "version")

    def __init__(self, meter: "ActivationMeter", tensor: Tensor, saved_storages: dict[int, Storage]) -> None:
        self.meter = meter
        self.tensor = _detached(tensor)
        self.version = _version(tensor)
        self.saved_storages = saved_storages
        meter._retain(saved_storages)

    def __del__(self) -> None:
        self.meter._release(self.saved_storages)


def _detached(tensor: Tensor) -> Tensor:
    """Return the tensor without its history, by no operator that a dispatch mode observes where that is possible."""
    if type(tensor) not in PLAIN_TYPES:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class ActivationMeter:
    """A meter of the most bytes saved for backward at once in measure(), around a step or its forwards and backwards.

    It counts the whole of every storage that autograd saves: activations and the inputs that it keeps. A storage that a
    parameter or buffer of the model uses at that moment is not counted, including gathered parameters. Only the inputs
    of a part under torch.utils.checkpoint (use_reentrant=False) are counted until its second forward, which must run
    inside recompute(); what that forward saves is counted until it is freed. Tensors that code keeps outside autograd
    (attributes of a context, a cache) are not counted. `on_saved` is called with the address of every storage that is
    saved or released. If `device` is not None, only storages on it are counted and reported. Storages that were passed
    to offloaded() have a count of their own.
    """

    def __init__(
        self, model: nn.Module, on_saved: SavedCallback | None = None, device: torch.device | None = None
    ) -> None:
        self.peak_bytes = self.peak_offloaded_bytes = 0
        self._on_saved = on_saved
        self._device = device
        self._offloaded: set[int] = set()  # identities of storages on the host whose content was saved on the device
        self._offloaded_bytes = 0
        self._modules = tuple(model.modules())
        self._places: dict[int, tuple[dict[str, Any], str]] = {}  # where a weight's storage was found last
        self.saved_bytes = 0  # saved for backward at present
        self._handle_counts: Counter[int] = Counter()  # the number of handles that keep each storage
        self._recomputed: set[int] = set()  # identities of storages that count until they are freed

    @contextmanager
    def measure(self) -> Iterator["ActivationMeter"]:
        """Count what is saved inside the block, until it is released."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield self

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Count what the second forward of a checkpointed part saves; checkpoint's own hooks stay in effect."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None:
            yield
            return
        outer_pack, outer_unpack = outer

        def pack(tensor: Tensor) -> Any:
            self.watch(tensor)
            return outer_pack(tensor)

        with saved_tensors_hooks(pack, outer_unpack):
            yield

    def offloaded(self, tensor: Tensor) -> None:
        """Mark a tensor on the host, about to be saved for backward, as the offloaded copy of an activation."""
        self._offloaded |= {storage.identity for storage in storages(tensor)}

    def _pack(self, tensor: Tensor) -> "Tensor | _SavedHandle":
        saved_storages = self._activations(tensor)
        if saved_storages:
            return _SavedHandle(self, tensor, saved_storages)
        # Return the weight itself, not its present data, which an engine may replace (ZeRO-3 frees and gathers it).
        return tensor if tensor.is_leaf else tensor.detach()

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's storages until they are freed, because checkpoint does not show what keeps them.

        Storages that are already counted are skipped: a part's input may be a buffer that is never freed.
        """
        for local in plain_tensors(tensor):
            for identity, storage in self._activations(local).items():
                if identity not in self._recomputed and identity not in self._handle_counts:
                    self._recomputed.add(identity)
                    self._retain({identity: storage})
                    weakref.finalize(local.untyped_storage(), self._freed, storage).atexit = False

    def _freed(self, storage: Storage) -> None:
        self._recomputed.discard(storage.identity)
        self._release({storage.identity: storage})

    def _activations(self, tensor: Tensor) -> dict[int, Storage]:
        """Return a tensor's storages by identity, or nothing if weights use all of them."""
        by_identity = {storage.identity: storage for storage in storages(tensor)}
        return {} if all(map(self._is_weight, by_identity)) else by_identity

    def _is_weight(self, identity: int) -> bool:
        """Return whether a weight uses a storage at present: sharded engines gather, free and replace them."""
        if identity in self._handle_counts:  # it is saved already, as no weight is
            return False
        if self._is_in_place(identity):
            return True
        if identity not in self._weights():
            return False
        self._places = self._find_weights()
        return True

    def _is_in_place(self, identity: int) -> bool:
        """Return whether the storage still belongs to the weight to which it belonged when weights were looked up."""
        tensors, name = self._places.get(identity, ({}, ""))
        tensor = tensors.get(name)
        return tensor is not None and identity in storage_identities(tensor)

    def _weights(self) -> set[int]:
        """Return the identities of the weights' present storages."""
        parameters = [module._parameters.values() for module in self._modules if module._parameters]
        buffers = [module._buffers.values() for module in self._modules if module._buffers]
        tensors: list[Tensor] = [tensor for each in (*parameters, *buffers) for tensor in each if tensor is not None]
        identities = {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor) in PLAIN_TYPES}  # most are
        wrapped = (tensor for tensor in tensors if type(tensor) not in PLAIN_TYPES)
        return identities.union(*map(storage_identities, wrapped))

    def _find_weights(self) -> dict[int, tuple[dict[str, Any], str]]:
        """Return where each weight is whose storage is present, by the storage's identity."""
        places: dict[int, tuple[dict[str, Any], str]] = {}
        for module in self._modules:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        places.update(dict.fromkeys(storage_identities(tensor), (tensors, name)))
        return places

    def _retain(self, saved_storages: dict[int, Storage]) -> None:
        for identity, storage in saved_storages.items():
            if self._handle_counts[identity] == 0:
                self._count(storage, True)
            self._handle_counts[identity] += 1
        self.peak_bytes = max(self.peak_bytes, self.saved_bytes)
        self.peak_offloaded_bytes = max(self.peak_offloaded_bytes, self._offloaded_bytes)

    def _release(self, saved_storages: dict[int, Storage]) -> None:
        for identity, storage in saved_storages.items():
            self._handle_counts[identity] -= 1
            if self._handle_counts[identity] == 0:
                del self._handle_counts[identity]
                self._count(storage, False)
                self._offloaded.discard(identity)

    def _count(self, storage: Storage, is_saved: bool) -> None:
        size = storage.bytes if is_saved else -storage.bytes
        if storage.identity in self._offloaded:
            self._offloaded_bytes += size
        if self._device is None or storage.device == self._device.type:
            self.saved_bytes += size
            if self._on_saved is not None:
                self._on_saved(storage.address, is_saved)


def _unpack(saved: "Tensor | _SavedHandle") -> Tensor:
    """Return the saved tensor.

    Raise RuntimeError if it was changed in place since then, because torch leaves this check to the hooks.
    """
    if not isinstance(saved, _SavedHandle):
        return saved
    if _version(saved.tensor) != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" a tensor of shape {tuple(saved.tensor.shape)} is at version {_version(saved.tensor)},"
            f" not {saved.version}"
        )
    return saved.tensor
