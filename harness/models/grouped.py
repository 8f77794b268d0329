"""Rows of tokens sorted by expert: their copies and sums, and products of each expert's rows with its own matrix."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor


class GroupedLinear(nn.Module):
    """As many matrices as there are experts, stacked as one weight (experts, out, in)."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the products (rows, out) of rows (rows, in) with the matrix of the expert that each belongs to.

        `ends` (experts,) has the number of rows up to the end of each expert's, in int32.
        """
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return GroupedProduct.apply(rows, weight, ends)  # type: ignore[no-any-return,no-untyped-call]


class GroupedProduct(Function):
    """The products of rows with the matrices of their experts.

    It keeps the weight itself for backward, and no view of it, which would keep a gathered weight in memory that
    DeepSpeed's stage 3 has freed.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return the products."""
        ctx.save_for_backward(rows, weight, ends)
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of rows and weight; that of an expert without rows is zero."""
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()  # a grouped product takes no expanded tensors
        of_rows = F.grouped_mm(gradient, weight, offs=ends) if ctx.needs_input_grad[0] else None
        of_weight = F.grouped_mm(gradient.t(), rows, offs=ends) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, None


class Router(nn.Linear):
    """The matrix that scores experts, in fp32: rounding to 16 bits would change the choice between close ones.

    It keeps its arguments in the width that they have, as Megatron-LM's router does (moe/moe_utils.py).
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores (tokens, experts) of tokens (tokens, hidden)."""
        return WidenedProduct.apply(tokens, self.weight)  # type: ignore[no-any-return,no-untyped-call]


class WidenedProduct(Function):
    """The product of rows with the rows of a weight, computed in fp32."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the products in fp32."""
        ctx.save_for_backward(rows, weight)
        return rows.float() @ weight.float().t()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of rows and weight, as wide as they are."""
        rows, weight = ctx.saved_tensors
        return (gradient @ weight.float()).to(rows.dtype), (gradient.t() @ rows.float()).to(weight.dtype)


class CopyRows(Function):
    """Copies of tokens, whose gradients are summed by token in a fixed order, as the atomic sums of torch's are not."""

    @staticmethod
    def forward(ctx: FunctionCtx, tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        """Return the rows."""
        ctx.save_for_backward(token_of_row, rows_of_token)
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the tokens."""
        return sum_rows(gradient, *ctx.saved_tensors), None, None


class SumRows(Function):
    """Sums of the rows of each token: the transpose of CopyRows."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        """Return the sums."""
        ctx.save_for_backward(token_of_row, rows_of_token)
        by_token = rows.index_select(0, rows_of_token.flatten())
        return by_token.view(*rows_of_token.shape, rows.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the rows."""
        return copy_rows(gradient, *ctx.saved_tensors), None, None


def copy_rows(tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
    """Return copies (rows, hidden) of tokens (tokens, hidden), one for each use of a token.

    `token_of_row` (rows,) is the index of each row's token, `rows_of_token` (tokens, uses) those of each token's rows.
    """
    return CopyRows.apply(tokens, token_of_row, rows_of_token)  # type: ignore[no-any-return,no-untyped-call]


def sum_rows(rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
    """Return the sums (tokens, hidden) of the rows of each token; the indices are those of copy_rows()."""
    return SumRows.apply(rows, token_of_row, rows_of_token)  # type: ignore[no-any-return,no-untyped-call]


def sorted_places(order: Tensor) -> Tensor:
    """Return where sorting puts each element, by the indices (elements,) of the elements in their order."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def count_tokens(experts: Tensor, count: int) -> Tensor:
    """Return how many tokens each of `count` experts has (experts,), by indices of experts; no device is waited for."""
    indices = experts.flatten()
    return torch.zeros(count, dtype=torch.int64, device=indices.device).scatter_add_(
        0, indices, torch.ones_like(indices)
    )
