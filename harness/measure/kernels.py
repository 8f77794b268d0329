"""Which implementation ran where torch chooses among several: told by its operator."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.records.schema import COMPOSED

# In the order in which they are asked for; math composes attention of plain operators, where no fused kernel can be
# used (fp32 with grouped heads on CUDA).
ORDER = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_efficient_attention_forward": "efficient",  # of queries that are fewer than the keys
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_softmax": COMPOSED,
    "aten::_safe_softmax": COMPOSED,
}

OPTIMIZER = {"aten::_fused_adamw_": "fused", "aten::_foreach_sqrt": "foreach"}

ACTIVATION_FUNCTIONS = ("aten::silu", "aten::gelu")  # compiled code has them inside kernels of its own


@contextmanager
def attention_backend_priority() -> Iterator[None]:
    """Torch's attention takes the first kernel of ORDER that it can. On a CPU the order is torch's own."""
    with sdpa_kernel(ORDER, set_priority=True):
        yield


class KernelUse:
    """The implementations heard in a step."""

    def __init__(self) -> None:
        self.attention: set[str] = set()
        self.optimizer: set[str] = set()
        self.activation_functions = 0

    def record(self, operator: str) -> None:
        self.activation_functions += operator in ACTIVATION_FUNCTIONS
        if operator in ATTENTION:
            self.attention.add(ATTENTION[operator])
        if operator in OPTIMIZER:
            self.optimizer.add(OPTIMIZER[operator])
