"""The memory that fake tensors would take on their device: the bytes of their storages, as requested."""

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.fsdp  # defines the operators of fully_shard
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.simulator import cuda_api

WORKSPACE = -1  # stands for the identity of a kernel's own memory, which is no storage's


class Request(NamedTuple):
    """A storage that is allocated, or freed: then its bytes are negative."""

    identity: int
    bytes: int
    stream: int  # the number of the stream that is current, which is the storage's if it is allocated


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the storages of results on a device, from the operator that makes them to their end.

    What a kernel allocates for itself is counted only where harness.simulator.fake_memory tells it.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.sizes: dict[int, int] = {}  # of live storages, by identity
        self.live_bytes = self.peak_bytes = 0
        self.is_paused = False
        self.requests: list[Request] = []
        self.workspaces = CPU_WORKSPACES if device_type == "cpu" else {}
        self.on_operator: Callable[[Any, Any, Any, Any], None] = lambda func, args, kwargs, result: None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False so that torch does not switch Dynamo off and on again around every operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked about a fake tensor, more often than all others together
            return func(*args)
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # torch dispatches the plain operators that it consists of afterwards
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        if func in self.workspaces:
            self.set_size(WORKSPACE, self.workspaces[func](args, kwargs or {}))  # which it has while it runs
            self.set_size(WORKSPACE, None)
        self.on_operator(func, args, kwargs or {}, result)
        leaves: list[Any] = tree_leaves(result)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device.type == self.device_type:
                self.observe(leaf.untyped_storage())
        return result

    def reset_peak(self) -> None:
        """Start a new peak from the bytes that are live now."""
        self.peak_bytes = self.live_bytes

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Return a context whose new storages are not counted."""
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    def observe(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on, unless it is counted already."""
        identity = storage._cdata
        if identity not in self.sizes:
            self.set_size(identity, storage.nbytes())
            weakref.finalize(storage, self.set_size, identity, None).atexit = False

    def set_size(self, identity: int, size: int | None) -> None:
        """Set the size of a storage, or forget one that has ended."""
        freed = self.sizes.pop(identity, 0)
        for change in (-freed, size or 0):
            if change:
                self.requests.append(Request(identity, change, cuda_api.current_stream_number()))
        self.live_bytes += (size or 0) - freed
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if size is not None:
            self.sizes[identity] = size


@contextmanager
def count_storages(device_type: str) -> Iterator[StorageCounter]:
    """Return a context in which the storages of new fake tensors on a device are counted; yield their counter.

    DTensor computes the shape of a whole result by a fake operator of its own, whose result is not counted.
    """
    counter, resize = StorageCounter(device_type), torch.UntypedStorage.resize_
    propagate_shape = ShardingPropagator._propagate_tensor_meta_non_cached

    def counted_resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result: torch.UntypedStorage = resize(storage, size)
        if storage._cdata in counter.sizes:
            counter.set_size(storage._cdata, storage.nbytes())
        return result

    def uncounted_shape(*arguments: Any, **keywords: Any) -> Any:
        with counter.pause():
            return propagate_shape(*arguments, **keywords)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", counted_resize),
        mock.patch.object(torch.cuda, "memory_allocated", lambda device=None: counter.live_bytes),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted_shape),
        counter,
    ):
        yield counter


def chunk_cat_bytes(tensors: Sequence[Tensor], dim: int, num_chunks: int) -> int:
    """Return the bytes of the padded copies of tensors whose rows do not divide evenly (aten's _pad_chunk)."""
    return sum(
        math.ceil(tensor.shape[dim] / num_chunks) * num_chunks * (tensor.nbytes // max(1, tensor.shape[dim]))
        for tensor in tensors
        if tensor.shape[dim] % num_chunks
    )


def _chunk_cat_call_bytes(arguments: Sequence[Any], keywords: dict[str, Any]) -> int:
    names = ("tensors", "dim", "num_chunks")
    values = dict(zip(names, arguments, strict=False)) | {name: keywords[name] for name in names if name in keywords}
    return chunk_cat_bytes(**values)


def conversion_bytes(operands: Sequence[Tensor]) -> int:
    """Return the bytes of the copies in the common dtype that elementwise operators make of other operands.

    It is aten's TensorIterator that converts them, on a CPU only; scalars are converted without memory.
    """
    tensors = [operand for operand in operands if operand.dim()]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) < 2:
        return 0
    common = functools.reduce(torch.promote_types, dtypes)
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common)


def _elementwise_call_bytes(arguments: Sequence[Any], keywords: dict[str, Any]) -> int:
    return conversion_bytes([argument for argument in arguments if isinstance(argument, Tensor)])


def _foreach_call_bytes(arguments: Sequence[Any], keywords: dict[str, Any]) -> int:
    pairs = zip(arguments[0], arguments[1], strict=True)
    return max(map(conversion_bytes, pairs), default=0)


_aten = torch.ops.aten

# By operator, the bytes that a call with these arguments and keywords takes beside its results.
CPU_WORKSPACES: dict[Any, Callable[[Sequence[Any], dict[str, Any]], int]] = {
    torch.ops.fsdp.chunk_cat.default: _chunk_cat_call_bytes,
    _aten._foreach_add_.List: _foreach_call_bytes,
    **dict.fromkeys(
        (
            *(_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.sub_.Tensor),
            *(_aten.mul.Tensor, _aten.mul_.Tensor, _aten.div.Tensor, _aten.div_.Tensor),
        ),
        _elementwise_call_bytes,
    ),
}
