"""The memory that kernels of a CPU allocate for themselves while they run, where it is as large as their operands.

On CUDA these kernels need none. Products in 16 bit may take memory of oneDNN on some processors, which is not modeled.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.fsdp  # defines the operators of fully_shard
from torch import Tensor


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
