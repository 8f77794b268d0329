"""The kernels that ran where torch chooses among several implementations, recognized by their operators."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.config.optimizer import OPTIMIZERS
from harness.records.rank_report import COMPOSED

# The order of preference. MATH composes attention from plain operators, where no fused kernel can be used.
_PRIORITY = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

CUDNN_FIRST = (9, 10)  # the major compute capabilities on which torch prefers cuDNN's attention: Hopper, Blackwell

ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_efficient_attention_forward": "efficient",  # used for fewer queries than keys
    "aten::_flash_attention_forward": "flash",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_softmax": COMPOSED,
    "aten::_safe_softmax": COMPOSED,
}

SCORE_DIMS = 4  # of attention's scores (batch, heads, queries, keys); a router's have tokens and experts alone

OPTIMIZER = {
    operator: name
    for optimizer in OPTIMIZERS.values()
    for rule in optimizer.rules
    for operator, name in rule.kernels.items()
}

ACTIVATION_FUNCTIONS = ("aten::silu", "aten::gelu")  # compiled code has them inside its own kernels


def attention_kernel(operator: str, first: Any) -> str | None:
    """Return the attention kernel that an operator with this first argument is part of; None if it is part of none."""
    is_other_softmax = ATTENTION.get(operator) == COMPOSED and first.dim() < SCORE_DIMS
    return None if is_other_softmax else ATTENTION.get(operator)


@contextmanager
def attention_backend_priority(prefers_cudnn: bool = False) -> Iterator[None]:
    """Make torch's attention use the first kernel of _PRIORITY that can run, or cuDNN's before it.

    The order on a CPU is torch's own. Under context parallelism cuDNN's is not to be preferred: torch's causal masks
    (torch.nn.attention.bias) call flash or the efficient kernel themselves, and one kernel should run on all ranks.
    """
    first = [SDPBackend.CUDNN_ATTENTION] if prefers_cudnn else []
    with sdpa_kernel([*first, *(kernel for kernel in _PRIORITY if kernel not in first)], set_priority=True):
        yield


def prefers_cudnn(device: torch.device) -> bool:
    """Return whether torch prefers cuDNN's attention on a device, as it does where that is twice as fast as flash.

    torch settles its order when it first chooses a kernel on CUDA, over any order that was set before (sdp_utils.cpp,
    priority_order). So it chooses one here.
    """
    if device.type != "cuda":
        return False
    tensor = torch.zeros(1, 1, 8, 8, device=device)
    torch._fused_sdp_choice(tensor, tensor, tensor)
    return bool(torch._C._get_sdp_priority_order()[0] == SDPBackend.CUDNN_ATTENTION.value)
