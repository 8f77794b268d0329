"""torchao's AdamW with narrow states, whose step is compiled on a GPU alone: on a CPU that takes minutes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torchao.optim
from torch import Tensor
from torchao.optim.adam import _AdamBase


class UncompiledOnCPU(_AdamBase):  # type: ignore[misc]
    """A base of torchao's optimizers that runs the operators of its step one by one where parameters lie on a CPU."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its rate in the width in which it is configured: torchao makes a tensor of it."""
        lr = torch.tensor(param_group.get("lr", self.defaults["lr"]), dtype=torch.float64)
        super().add_param_group(param_group | {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
            return super().step(closure)


class AdamW8bit(UncompiledOnCPU, torchao.optim.AdamW8bit):  # type: ignore[misc]
    """torchao's AdamW with moments of 8 bits and a scale for each block of 256."""


class AdamWBf16(UncompiledOnCPU):
    """torchao's AdamW with all moments in bf16."""

    def __init__(
        self, params: Iterable[Any], lr: Tensor, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        """Take the settings of AdamW. Weights of 16 bits are rounded to nearest."""
        super().__init__(
            params, lr, betas, eps, weight_decay, False, block_size=0, bf16_stochastic_round=False, is_adamw=True
        )

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        return torch.zeros_like(p, dtype=torch.bfloat16)
