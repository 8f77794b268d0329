"""What is held for backward: the bytes of the distinct storages that autograd saves, weights and buffers left out."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from harness.tensors.storage import Storage, plain_tensors, storages

OnHold = Callable[[int, bool], None]  # an address is held for backward, or no longer


class _SavedHandle:
    """A saved tensor; it lives as long as autograd keeps it, and tells the meter when it goes.

    It keeps a detached tensor: the tensor itself may be the output of the very node that holds this.
    """

    __slots__ = ("held", "meter", "tensor", "version")

    def __init__(self, meter: "ActivationMeter", tensor: Tensor, held: dict[int, Storage]) -> None:
        self.meter = meter
        self.tensor = tensor.detach()
        self.version = _version(tensor)
        self.held = held
        meter._hold(held)

    def __del__(self) -> None:
        self.meter._release(self.held)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class ActivationMeter:
    """The most bytes held for backward while entered; enter it around a step, or around its forwards and backwards.

    What counts is every storage, whole, that autograd saves: activations, and the inputs that it keeps. A storage
    that a parameter or buffer of the model uses when it is saved is left out, gathered parameters included. A part
    under torch.utils.checkpoint (use_reentrant=False) counts by its inputs until its second forward, which must run
    inside recompute(); what that saves counts until it is freed. Tensors that code keeps outside autograd (a context's
    attributes, a cache) are not seen. `told` is called with the address of every storage that is held or let go.
    Where a `device` is named, only what lies on it is counted and told; what offloaded() was told of has its own count.
    """

    def __init__(self, model: nn.Module, on_hold: OnHold | None = None, device: torch.device | None = None) -> None:
        self.peak_bytes = self.peak_offloaded_bytes = 0
        self._told = on_hold
        self._device = device
        self._offloaded: set[int] = set()  # storages on the host that hold what was saved on the device
        self._offloaded_bytes = 0
        self._modules = tuple(model.modules())
        self._held_bytes = 0
        self._holders: Counter[int] = Counter()  # by storage: how many keep it for backward
        self._recomputed: set[int] = set()  # storages watched until they are freed
        self._hooks: saved_tensors_hooks | None = None

    @property
    def held_bytes(self) -> int:
        """Held for backward now."""
        return self._held_bytes

    def __enter__(self) -> "ActivationMeter":
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
        self._hooks = None

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Around the second forward of a checkpointed part: checkpoint's own hooks go on, this only looks on."""
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
        """This tensor, which is about to be held for backward, holds on the host what was saved."""
        self._offloaded |= {storage.identity for storage in storages(tensor)}

    def _pack(self, tensor: Tensor) -> "Tensor | _SavedHandle":
        held = self._activations(tensor)
        if held:
            return _SavedHandle(self, tensor, held)
        # A weight itself, not its data of this moment: an engine may swap that (ZeRO-3 frees and gathers again).
        return tensor if tensor.is_leaf else tensor.detach()

    def watch(self, tensor: Tensor) -> None:
        """Counts a tensor's storages until they are freed: who holds them is checkpoint's secret.

        Not those already counted: a part's input, which may be a buffer that is never freed.
        """
        for local in plain_tensors(tensor):
            for identity, storage in self._activations(local).items():
                if identity not in self._recomputed and identity not in self._holders:
                    self._recomputed.add(identity)
                    self._hold({identity: storage})
                    weakref.finalize(local.untyped_storage(), self._freed, storage).atexit = False

    def _freed(self, storage: Storage) -> None:
        self._recomputed.discard(storage.identity)
        self._release({storage.identity: storage})

    def _activations(self, tensor: Tensor) -> dict[int, Storage]:
        """A tensor's storages by identity, where they are no weight's."""
        found = {storage.identity: storage for storage in storages(tensor)}
        return {} if found.keys() <= self._weights() else found

    def _weights(self) -> set[int]:
        """Storages of the parameters and buffers at this moment; sharded engines gather, free and swap them."""
        tensors = (
            tensor
            for module in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        )
        return {storage.identity for tensor in tensors for storage in storages(tensor)}

    def _hold(self, held: dict[int, Storage]) -> None:
        for identity, storage in held.items():
            if self._holders[identity] == 0:
                self._count(storage, storage.bytes)
                self._tell(storage, True)
            self._holders[identity] += 1
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        self.peak_offloaded_bytes = max(self.peak_offloaded_bytes, self._offloaded_bytes)

    def _release(self, held: dict[int, Storage]) -> None:
        for identity, storage in held.items():
            self._holders[identity] -= 1
            if self._holders[identity] == 0:
                del self._holders[identity]
                self._count(storage, -storage.bytes)
                self._offloaded.discard(identity)
                self._tell(storage, False)

    def _count(self, storage: Storage, size: int) -> None:
        if self._is_counted(storage):
            self._held_bytes += size
        if storage.identity in self._offloaded:
            self._offloaded_bytes += size

    def _tell(self, storage: Storage, held: bool) -> None:
        if self._told is not None and self._is_counted(storage):
            self._told(storage.address, held)

    def _is_counted(self, storage: Storage) -> bool:
        return self._device is None or storage.device == self._device.type


def _unpack(kept: "Tensor | _SavedHandle") -> Tensor:
    """Raises RuntimeError if the tensor was changed in place since it was saved, which torch leaves to hooks."""
    if not isinstance(kept, _SavedHandle):
        return kept
    if _version(kept.tensor) != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" a tensor of shape {tuple(kept.tensor.shape)} is at version {_version(kept.tensor)}, not {kept.version}"
        )
    return kept.tensor
