"""What one rank has to say of its profiled step."""

from typing import Any, NamedTuple

from harness.measure.communication import Traffic
from harness.measure.gradients import GradientStatistic


class AtPeak(NamedTuple):
    """When memory was fullest, and what filled it; the parts add up to `bytes`, as torch requested them."""

    phase: str
    bytes: int
    parts: tuple[dict[str, Any], ...]  # role, what, bytes


class ProfiledStep(NamedTuple):
    gradients: list[GradientStatistic]
    gradient_bytes: int  # the most held during the step
    placed_gradients: dict[str, int]  # bytes of the reduced ones by kind of device
    gradient_dtypes: tuple[str, ...]  # of the reduced ones
    activation_bytes: int  # the most held for backward during the step, on the device
    offloaded_activation_bytes: int  # the most that activation offload held on the host
    recomputations: int  # second forwards of checkpointed parts
    in_flight: int  # the most forwards whose backward was not finished
    split_backwards: int  # whose first half, for inputs, left the gradients of weights alone
    flops: int  # of matrix products and attention, second forwards included
    peak_allocated_bytes: int | None
    at_peak: AtPeak | None  # None where memory is not counted
    communication: tuple[Traffic, ...]
    attention_kernels: tuple[str, ...]
    optimizers: tuple[str, ...]  # implementations of its step
    layers_compiled: bool  # none of a layer's activation functions ran as an operator
