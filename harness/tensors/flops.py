"""The floating-point operations of one operator, by torch's formulas, and of attention by formulas for any device."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


# The dimension of positions in the two layouts of queries and keys: (batch, heads, seq, head_dim) and, in the kernels
# that scaled_dot_product_attention's operators call, (batch, seq, heads, head_dim).
_HEADS_FIRST, _POSITIONS_FIRST = 2, 1


def _attention(positions_dim: int) -> Callable[..., int]:
    """Count two products, of queries with keys and of scores with values; a causal mask does not halve them."""

    def count(query: Tensor, key: Tensor, *_: Any) -> int:
        return 4 * prod(query.shape) * key.shape[positions_dim]

    return count


def _attention_backward(positions_dim: int) -> Callable[..., int]:
    """Count the recomputed scores, and two products for each of forward's two (arXiv 2205.14135, algorithm 4)."""

    def count(_: Tensor, query: Tensor, key: Tensor, *__: Any) -> int:
        return 10 * prod(query.shape) * key.shape[positions_dim]

    return count


def _grouped_product(left: Tensor, right: Tensor, *_: Any) -> int:
    """Count the products of each expert's rows with its matrix: every row once, whatever expert it belongs to.

    Where both have two dimensions, the groups divide the one that is summed over.
    """
    return 2 * prod(left.shape) * right.shape[-1]


# torch has no formula for the kernel on CPU, and in some versions none for grouped-query heads. Its formulas of the
# memory-efficient kernel and of raw flash attention take tensors whose positions come first for tensors whose heads do,
# which is wrong or an AssertionError. torch.nn.attention.bias calls the former for fewer queries than keys.
GROUPED_PRODUCT = _aten._grouped_mm

ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention: _attention(_HEADS_FIRST),
    _aten._scaled_dot_product_efficient_attention: _attention(_HEADS_FIRST),
    _aten._scaled_dot_product_cudnn_attention: _attention(_HEADS_FIRST),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(_HEADS_FIRST),
    _aten._flash_attention_forward: _attention(_POSITIONS_FIRST),
    _aten._efficient_attention_forward: _attention(_POSITIONS_FIRST),
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward(_HEADS_FIRST),
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward(_HEADS_FIRST),
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward(_HEADS_FIRST),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward(_HEADS_FIRST),
    _aten._flash_attention_backward: _attention_backward(_POSITIONS_FIRST),
    _aten._efficient_attention_backward: _attention_backward(_POSITIONS_FIRST),
}

_BATCHED_DIMS = 4  # queries of packed sequences of several lengths have three dimensions and torch's own formula


def multiplies_packed(operator: Any) -> bool:
    """Return whether an operator multiplies by a matrix in 4 bits: inputs (..., in), packed weights, (out, in), ...

    It is known by its name, as the library is loaded where it is used.
    """
    return str(operator) == "bitsandbytes.gemm_4bit.default"


def has_flops(operator: Any) -> bool:
    """Return whether operator_flops() has a formula for an operator."""
    packet = getattr(operator, "_overloadpacket", None)
    is_known = packet in ATTENTION_FLOPS or packet is GROUPED_PRODUCT or packet in flop_registry
    return is_known or multiplies_packed(operator)


def operator_flops(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the operations of a matrix product or attention; 0 for any other operator, as the literature counts."""
    packet = getattr(operator, "_overloadpacket", None)
    if packet in ATTENTION_FLOPS and args[1].dim() == _BATCHED_DIMS:
        return ATTENTION_FLOPS[packet](*args)
    if packet is GROUPED_PRODUCT:
        return _grouped_product(*args)
    if multiplies_packed(operator):
        inputs, _, shape, *_ = args
        return 2 * int(inputs.numel()) * int(shape[0])
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0
