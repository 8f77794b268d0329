"""The memory that fake tensors would take on their device: the bytes of their storages, as requested."""

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed.fsdp  # defines the operators of fully_shard
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from harness.measure.native_allocator import LogLines
from harness.simulator import cuda_api
from harness.simulator.stand_ins import around
from harness.tensors.autograd import is_accumulation

# They stand for identities, which no storage has.
WORKSPACE = -1  # of a kernel's own memory
EMPTY_CACHE = -2  # of a request that the allocator give back what it has cached
CUBLAS_WORKSPACES = (-3, -4)  # of those that cuBLAS keeps, for forward and for the thread that runs backward


class Request(NamedTuple):
    """A storage that is allocated, or freed: then its bytes are negative; or EMPTY_CACHE, of no bytes."""

    identity: int
    bytes: int
    stream: int  # the number of the stream that is current, which is the storage's if it is allocated
    is_paused: bool  # whether the measurement makes it, and not the step


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the storages of results on a device, from the operator that makes them to their end.

    It is an Allocator whose addresses are the identities of storages. What a kernel allocates for itself is counted
    only where harness.simulator.fake_memory tells it.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.sizes: dict[int, int] = {}  # of live storages, by identity
        self._live_bytes = self._peak_bytes = 0  # bytes
        self.is_paused = False
        self.requests: list[Request] = []
        self.initial_sizes: list[tuple[int, int]] = []  # of the storages that were live when the log began
        self.first_line = self.log_peak = 0  # the number of the request in the log's first line, and the log's peak
        self.is_log_paused = False
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
        if func is _aten.add.Tensor and is_accumulation(*args[:2]):
            func = _aten.add_.Tensor
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        if func in self.workspaces:
            self.set_size(WORKSPACE, self.workspaces[func](*args, **(kwargs or {})))  # which it has while it runs
            self.set_size(WORKSPACE, None)
        self.on_operator(func, args, kwargs or {}, result)
        leaves: list[Any] = tree_leaves(result)
        for leaf in leaves:
            if (
                isinstance(leaf, Tensor)
                and leaf.device.type == self.device_type
                and not is_traceable_wrapper_subclass(leaf)
            ):
                self.observe(leaf.untyped_storage())
        return result

    def live_bytes(self) -> int:
        """Return the bytes of the storages that live now."""
        return self._live_bytes

    def peak_bytes(self) -> int:
        """Return the most bytes that lived at once since reset_peak()."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Start a new peak from the bytes that are live now."""
        self._peak_bytes = self._live_bytes

    def begin_log(self) -> int:
        """Log every request from now on, first the storages that are live now. Return their number."""
        self.initial_sizes = list(self.sizes.items())
        self.first_line, self.log_peak = len(self.requests) - len(self.sizes), self._live_bytes
        return len(self.sizes)

    def log_length(self) -> int:
        """Return the number of lines logged so far."""
        return len(self.requests) - self.first_line

    def pause_log(self, is_log_paused: bool) -> int:
        """Exclude the lines from now on from the log's peak, or include them; return their number."""
        self.is_log_paused = is_log_paused
        return self.log_length()

    def end_log(self) -> int:
        """Return the most bytes that were live at once after a line outside pauses."""
        return self.log_peak

    def read_log(self) -> LogLines:
        """Return the identity and the bytes of every line."""
        requests = [request[:2] for request in self.requests[self.first_line + len(self.initial_sizes) :]]
        lines = [(identity, size, 0) for identity, size in (*self.initial_sizes, *requests)]
        return np.array(lines, np.int64).reshape(-1, 3)

    def empty_cache(self) -> None:
        """Have the allocator give back what it has cached."""
        self.requests.append(Request(EMPTY_CACHE, 0, cuda_api.current_stream().number, self.is_log_paused))

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
                stream = cuda_api.current_stream().number
                self.requests.append(Request(identity, change, stream, self.is_log_paused))
        self._live_bytes += (size or 0) - freed
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        if not self.is_log_paused:
            self.log_peak = max(self.log_peak, self._live_bytes)
        if size is not None:
            self.sizes[identity] = size


@contextmanager
def count_storages(device_type: str) -> Iterator[StorageCounter]:
    """Return a context in which the storages of new fake tensors on a device are counted; yield their counter.

    DTensor computes the shape of a whole result by a fake operator of its own, whose result is not counted.
    """
    counter = StorageCounter(device_type)

    def counted_resize(resize: Any, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result: torch.UntypedStorage = resize(storage, size)
        if storage._cdata in counter.sizes:
            counter.set_size(storage._cdata, storage.nbytes())
        return result

    def uncounted_shape(propagate_shape: Any, *arguments: Any, **keywords: Any) -> Any:
        with mock.patch.object(counter, "is_paused", True):
            return propagate_shape(*arguments, **keywords)

    with (
        around(torch.UntypedStorage, "resize_", counted_resize),
        mock.patch.object(torch.cuda, "memory_allocated", lambda device=None: counter.live_bytes()),
        mock.patch.object(torch.cuda, "empty_cache", counter.empty_cache),
        around(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted_shape),
        counter,
    ):
        yield counter


def chunk_cat_bytes(tensors: Sequence[Tensor], dim: int, num_chunks: int, **_: Any) -> int:
    """Return the bytes of the padded copies of tensors whose rows do not divide evenly (aten's _pad_chunk)."""
    return sum(
        math.ceil(tensor.shape[dim] / num_chunks) * num_chunks * (tensor.nbytes // max(1, tensor.shape[dim]))
        for tensor in tensors
        if tensor.shape[dim] % num_chunks
    )


def conversion_bytes(*operands: Any, **_: Any) -> int:
    """Return the bytes of the copies in the common dtype that elementwise operators make of other operands.

    It is aten's TensorIterator that converts them, on a CPU only; scalars are converted without memory.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor) and operand.dim()]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) < 2:
        return 0
    common = functools.reduce(torch.promote_types, dtypes)
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common)


def conversion_bytes_of_pairs(first: Sequence[Tensor], second: Sequence[Tensor], **_: Any) -> int:
    """Return the bytes of an operator over lists, which converts one pair after another."""
    return max(map(conversion_bytes, first, second), default=0)


_aten = torch.ops.aten

# By operator, the bytes that a call with its arguments takes beside its results.
CPU_WORKSPACES: dict[Any, Callable[..., int]] = {
    torch.ops.fsdp.chunk_cat.default: chunk_cat_bytes,
    _aten._foreach_add_.List: conversion_bytes_of_pairs,
    **dict.fromkeys(
        (
            *(_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.sub_.Tensor),
            *(_aten.mul.Tensor, _aten.mul_.Tensor, _aten.div.Tensor, _aten.div_.Tensor),
        ),
        conversion_bytes,
    ),
}
