"""Kernels for CPUs that sum the gradients of tokens in fp32, where torch's own sum them in 16 bits.

torch 2.13 adds up the gradient of an embedding token by token in the dtype of the gradient
(aten/src/ATen/native/Embedding.cpp, embedding_dense_backward_cpu), and so does every thread with the gradients of
LayerNorm's weight and bias (aten/src/ATen/native/cpu/layer_norm_kernel.cpp). In bfloat16 a summand is lost once the sum
is 512 times as large, and every one before is rounded: with 4,096 tokens of text the gradient of a frequent token's row
comes out a tenth too small, and how much is lost depends on how a layout divides the tokens. torch's kernels for GPUs
accumulate both in fp32: layer_norm_kernel.cu all tokens, Embedding.cu all of them too, or up to 32 at a time if they
are at most 3,072. With torch's kernels a CPU would be a poorer stand-in for a GPU, and no comparison of two layouts
could tell a gradient that is scaled by 1.1 from rounding.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library, get_kernel

HALF_PRECISION = (torch.bfloat16, torch.float16)

# The most elements of an activation that are in memory in fp32 at a time. torch starts no threads for so few.
CHUNK_ELEMENTS = 2**14

EMBEDDING, LAYER_NORM = "aten::embedding_dense_backward", "aten::native_layer_norm_backward"


@contextmanager
def fp32_sums() -> Iterator[None]:
    """Replace both kernels for CPUs until the end of the context; other dtypes and devices keep torch's own."""
    of_embedding, of_layer_norm = get_kernel(EMBEDDING, "CPU"), get_kernel(LAYER_NORM, "CPU")

    def embedding_backward(
        keys: torch.DispatchKeySet, gradient: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool
    ) -> Tensor:
        if gradient.dtype not in HALF_PRECISION or by_frequency:
            return of_embedding.call_boxed(keys, gradient, indices, rows, padding, by_frequency)  # type: ignore[no-any-return]
        return sum_by_index(gradient, indices, rows, padding)

    def layer_norm_backward(
        keys: torch.DispatchKeySet,
        gradient: Tensor,
        values: Tensor,
        shape: Sequence[int],
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        arguments = (gradient, values, shape, mean, rstd, weight, bias)
        if gradient.dtype not in HALF_PRECISION:
            return of_layer_norm.call_boxed(keys, *arguments, wanted)  # type: ignore[no-any-return]
        of_input, _, _ = of_layer_norm.call_boxed(keys, *arguments, [wanted[0], False, False])
        if not any(wanted[1:]):
            return of_input, None, None
        sums = layer_norm_sums(gradient, values, mean, rstd)
        vectors = (total.view(*shape).to((values if weight is None else weight).dtype) for total in sums)
        return of_input, *(vector if is_wanted else None for vector, is_wanted in zip(vectors, wanted[1:], strict=True))

    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl(EMBEDDING, embedding_backward, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
        library.impl(LAYER_NORM, layer_norm_backward, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def sum_by_index(gradient: Tensor, indices: Tensor, rows: int, padding: int = -1) -> Tensor:
    """Return the gradient (rows, hidden) of an embedding from that of its outputs (..., hidden) for indices (...).

    On an x86 CPU torch's index_add accumulates each row of 16 elements or more in fp32 and rounds once
    (ScatterGatherKernel.cpp, cpu_scatter_reduce_expanded_index). The row of the padding index has no gradient.
    """
    width = gradient.shape[-1]
    summed = gradient.new_zeros(rows, width).index_add_(0, indices.reshape(-1), gradient.reshape(-1, width))
    if 0 <= padding < rows:
        summed[padding] = 0
    return summed


def layer_norm_sums(gradient: Tensor, values: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients (hidden) of a LayerNorm's weight and bias in fp32, from that of its output (..., hidden).

    `values` (..., hidden) are its input, whose tokens have the statistics `mean` and `rstd` (...).
    """
    tokens = mean.numel()
    rows = [tensor.reshape(tokens, -1) for tensor in (gradient, values, mean, rstd)]
    of_weight, of_bias = torch.zeros(2, rows[0].shape[1], device=gradient.device)
    step = max(1, CHUNK_ELEMENTS // rows[0].shape[1])
    for start in range(0, tokens, step):
        of_output, normalized, mean_rows, rstd_rows = (row[start : start + step].float() for row in rows)
        of_bias += of_output.sum(0)
        of_weight += normalized.sub_(mean_rows).mul_(rstd_rows).mul_(of_output).sum(0)
    return of_weight, of_bias


# torch.linalg.vector_norm and torch._foreach_norm add squares in fp32 one after another on a CPU: their relative error
# is 1e-5 at 10^6 elements, 4e-4 at 10^7 and 1e-2 at 10^8. Norms of pieces of this size are accurate to 4e-6. A CPU
# widens 16-bit pieces to fp32, so many at a time: the copy of a whole gradient could be the peak of a step.
PIECE = 4096
WIDENED_PIECES = 256


def piece_norms(tensor: Tensor) -> Tensor:
    """Return the fp32 norms of the pieces of a flattened tensor, of PIECE elements each and the rest."""
    flat = tensor.reshape(-1)
    rows = flat.numel() // PIECE
    together = torch.split(flat[: rows * PIECE].view(rows, PIECE), WIDENED_PIECES if flat.is_cpu else max(1, rows))
    pieces = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in together]
    rest = torch.linalg.vector_norm(flat[rows * PIECE :], dtype=torch.float32)
    return torch.cat((*pieces, rest.reshape(1)))


def sums_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the fp64 sum of the squares of the elements of each tensor; all lie on one device."""
    norms = torch._foreach_norm([piece_norms(tensor) for tensor in tensors], dtype=torch.float64)
    return torch.stack(norms).square()
