"""The kernels that ran where torch chooses among several implementations, recognized by their operators."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.config.schema import OPTIMIZERS
from harness.records.rank_report import COMPOSED

# The order of preference. MATH composes attention from plain operators, where no fused kernel can be used.
_PRIORITY = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

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

OPTIMIZER = {operator: name for optimizer in OPTIMIZERS for operator, name in optimizer.kernels.items()}

ACTIVATION_FUNCTIONS = ("aten::silu", "aten::gelu")  # compiled code has them inside its own kernels


@contextmanager
def attention_backend_priority() -> Iterator[None]:
    """Make torch's attention use the first kernel of _PRIORITY that can run. The order on a CPU is torch's own."""
    with sdpa_kernel(_PRIORITY, set_priority=True):
        yield
