"""Whether a prediction fits a device: likely, tight or no, from the errors on file. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from harness.config.stack import StackMemory
from harness.cost_model.stack_memory import RankMemory

Fits = Literal["likely", "tight", "no"]

# The range of measured over predicted bytes of a stack without measurements of its own: that of the least predictable
# one, nanotron's.
UNMEASURED_RANGE = (0.84, 1.45)


@dataclass(frozen=True)
class FitVerdict:
    """A verdict and the range of bytes that it follows from."""

    fits: Fits
    low_bytes: float
    high_bytes: float


def fit_verdict(memory: RankMemory, capacity_bytes: float, stack: StackMemory) -> FitVerdict:
    """Return whether a rank fits a device of this memory.

    It is `no` if model state, or the lower end of what is allocated at the peak, exceeds the device, since torch gives
    back segments that nothing fills before it runs out, and `likely` if the upper end of what is reserved does not.
    The CUDA context takes its part of the device.
    """
    low, high = stack.measured_over_predicted or UNMEASURED_RANGE
    low_bytes = max(memory.estimate.peak_bytes * low, float(memory.resting_bytes))
    high_bytes = memory.reserved_bytes * high
    available = capacity_bytes - memory.estimate.process_bytes
    fits: Fits = "no" if low_bytes > available else "likely" if high_bytes <= available else "tight"
    return FitVerdict(fits, low_bytes, high_bytes)
