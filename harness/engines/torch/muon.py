"""torch's Muon for matrices that may be sharded."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz


class Muon(torch.optim.Muon):
    """torch's Muon, which gathers the update of a sharded matrix before it orthogonalizes it, once and in bf16.

    torch's own runs every product of the iterations on shards, which sends several times as much. Momentum and
    weights stay sharded; each rank orthogonalizes the whole matrix, and keeps its part.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the matrices that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]).bfloat16()
        if isinstance(update, DTensor):
            update = update.redistribute(placements=[Replicate()] * update.device_mesh.ndim)
        update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape))
