"""The configuration of precision: the dtypes of weights, gradients and optimizer state."""

import math
from dataclasses import dataclass

from harness.config.from_dict import require, require_one_of, require_positive

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per element, by torch's dtype names


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of one precision, by torch's names: the same in every engine, and never autocast."""

    name: str  # The name of the precision: fp32, bf16, bf16_mixed or fp16_mixed.
    compute: str  # The dtype of weights and activations in forward and backward.
    master: str  # The dtype of the parameters that the optimizer updates, and of its moments.
    accumulate: str  # The dtype in which gradients are summed over micro-batches.
    reduce: str  # The dtype in which gradients are sent between ranks.
    # The factor of the loss in the first step, which then adapts to overflows; null means that the loss is not scaled.
    initial_loss_scale: float | None = None
    loss_scale_window: int = 2000  # The number of steps without an overflow after which the loss scale is doubled.

    def __post_init__(self) -> None:
        require_one_of("precision", self.name, ("fp32", "bf16", "bf16_mixed", "fp16_mixed"))
        require_positive("precision", self, "loss_scale_window")
        if self.initial_loss_scale is not None:
            rule = "is not a finite number above 0: choose one, such as 65536"
            is_valid = math.isfinite(self.initial_loss_scale) and self.initial_loss_scale > 0
            require(is_valid, "precision.initial_loss_scale", self.initial_loss_scale, rule)

    @property
    def is_mixed(self) -> bool:
        """Whether the optimizer updates copies of another width than the weights that compute."""
        return self.compute != self.master

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of `compute`."""
        return DTYPE_BYTES[self.compute]

    @property
    def master_bytes(self) -> int:
        """Bytes per element of `master`."""
        return DTYPE_BYTES[self.master]

    @property
    def accumulate_bytes(self) -> int:
        """Bytes per element of `accumulate`."""
        return DTYPE_BYTES[self.accumulate]

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of `reduce`."""
        return DTYPE_BYTES[self.reduce]
