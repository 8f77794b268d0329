"""The floating-point operations of one operator, by torch's formulas, and of attention by formulas for any device."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _attention(query: Tensor, key: Tensor, *_: Any) -> int:
    """Count two products, of queries with keys and of scores with values; a causal mask does not halve them."""
    return 4 * prod(query.shape) * key.shape[-2]


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, *__: Any) -> int:
    """Count the recomputed scores, and two products for each of forward's two (arXiv 2205.14135, algorithm 4)."""
    return 10 * prod(query.shape) * key.shape[-2]


# torch has no formula for the kernel on CPU, and in some versions none for grouped-query heads.
_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_cudnn_attention: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def operator_flops(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the operations of a matrix product or attention; 0 for any other operator, as the literature counts."""
    packet = getattr(operator, "_overloadpacket", None)
    if packet in _ATTENTION:
        return _ATTENTION[packet](*args)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0
