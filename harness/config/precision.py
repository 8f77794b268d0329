"""The configuration of precision: the dtypes of weights, gradients and optimizer state."""

from dataclasses import dataclass
from typing import Annotated

from harness.config.from_dict import Positive, is_above_zero, one_of, rule

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per element, by torch's dtype names

Precision = Annotated[str, one_of("fp32", "bf16", "bf16_mixed", "fp16_mixed")]
LossScale = Annotated[float, rule(is_above_zero, "is not a finite number above 0: choose one, such as 65536")]


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of one precision, by torch's names: the same in every engine, and never autocast."""

    name: Precision  # The name of the precision: fp32, bf16, bf16_mixed or fp16_mixed.
    compute: str  # The dtype of weights and activations in forward and backward.
    master: str  # The dtype of the parameters that the optimizer updates, and of its moments.
    accumulate: str  # The dtype in which gradients are summed over micro-batches.
    reduce: str  # The dtype in which gradients are sent between ranks.
    # The factor of the loss in the first step, which then adapts to overflows; null means that the loss is not scaled.
    initial_loss_scale: LossScale | None = None
    loss_scale_window: Positive = 2000  # The number of steps without an overflow after which the loss scale is doubled.

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
