"""The memory that kernels of a CPU allocate for themselves while they run, where it is as large as their operands.

On CUDA these kernels need none. Products in 16 bit may take memory of oneDNN on some processors, which is not modeled.
"""

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


# By operator, the bytes that a call with these arguments and keywords takes beside its results.
CPU_WORKSPACES: dict[Any, Callable[[Sequence[Any], dict[str, Any]], int]] = {
    torch.ops.fsdp.chunk_cat.default: _chunk_cat_call_bytes,
}
