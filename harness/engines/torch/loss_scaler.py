"""Dynamic loss scaling for fp16 (mixed precision training, arXiv 1710.03740)."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.config.schema import PrecisionConfig
from harness.engines.torch.grad_norm import local_part


class LossScaler:
    """The factor by which every loss is multiplied; it is 1 if the precision needs no scaling.

    torch.amp.GradScaler has the same rule, but looks for an overflow only in what this rank holds. Here the global
    norm, which every rank knows, shows an overflow. The factor includes the average over the ranks with different
    tokens, as it includes the mean over micro-batches: gradients in fp16 are then equally large in every layout, and
    overflow in the same steps.
    """

    def __init__(self, precision: PrecisionConfig, averaged_over: int) -> None:
        self.averaged_over = averaged_over if precision.initial_loss_scale is not None else 1
        self.loss_scale = precision.initial_loss_scale or 1.0
        self.growth_interval = precision.loss_scale_window
        self.is_dynamic = precision.initial_loss_scale is not None
        self.steps_since_change = 0
        self.skipped_steps = 0

    @property
    def factor(self) -> float:
        """Return the factor on this rank's mean loss."""
        return self.loss_scale / self.averaged_over

    def state(self) -> dict[str, float]:
        """Return what changes from step to step."""
        return {name: getattr(self, name) for name in ("loss_scale", "steps_since_change", "skipped_steps")}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from a state."""
        self.loss_scale = state["loss_scale"]
        self.steps_since_change, self.skipped_steps = int(state["steps_since_change"]), int(state["skipped_steps"])

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide the gradients by the factor, in place."""
        if self.is_dynamic:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], 1 / self.factor)

    def update_and_check(self, grad_norm: Tensor) -> bool:
        """Adapt the scale, and return whether the norm is finite, so that the optimizer may step.

        This waits for the device if the scale is dynamic.
        """
        if not self.is_dynamic:
            return True
        finite = math.isfinite(grad_norm.item())
        self.steps_since_change = self.steps_since_change + 1 if finite else 0
        if not finite:
            self.loss_scale /= 2
            self.skipped_steps += 1
        elif self.steps_since_change == self.growth_interval:
            self.loss_scale *= 2
            self.steps_since_change = 0
        return finite
