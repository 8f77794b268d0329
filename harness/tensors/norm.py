"""Sums of squares that are accurate at any size, without a copy of the tensor."""

from collections.abc import Iterable

import torch
from torch import Tensor

# torch.linalg.vector_norm and torch._foreach_norm add squares in fp32 one after another on a CPU: their relative error
# is 1e-5 at 10^6 elements, 4e-4 at 10^7 and 1e-2 at 10^8. Norms of pieces of this size are accurate to 4e-6.
PIECE = 4096


def piece_norms(tensor: Tensor) -> Tensor:
    """Return the fp32 norms of the pieces of a flattened tensor, of PIECE elements each and the rest."""
    flat = tensor.reshape(-1)
    rows = flat.numel() // PIECE
    pieces = torch.linalg.vector_norm(flat[: rows * PIECE].view(rows, PIECE), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[rows * PIECE :], dtype=torch.float32)
    return torch.cat((pieces, rest.reshape(1)))


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the fp64 sum of the squares of all elements of tensors on one device."""
    return torch.cat([piece_norms(tensor) for tensor in tensors]).double().square().sum()
