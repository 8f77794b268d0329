"""The interval of a predicted step time, from the errors of predictions on file. Imports no torch.

What runs beside or between nodes is predicted less well than what a device computes, so that an interval is the wider
the more of a step is exposed communication, and the more nodes it goes over.
"""

import math

from harness.config.stack import StackTiming
from harness.cost_model.timing.step_time import StepTime

# How much wider an interval is, as a power of its stack's range, for exposed communication and each doubling of nodes.
SPREAD_GROWTH = 2.5

# The range of measured over predicted time of a stack without measurements of its own. It contains the ranges of all
# stacks that have one, and is no single stack's.
UNMEASURED_RANGE = (0.83, 1.26)


def interval_spread(time: StepTime, nodes: int) -> float:
    """Return the power to which a stack's range holds for a step: 1 where no communication is exposed."""
    exposed = sum(time.exposed_communication_seconds.values()) / time.step_seconds
    return 1 + SPREAD_GROWTH * exposed * math.log2(1 + nodes)


def step_seconds_interval(time: StepTime, timing: StackTiming, nodes: int) -> tuple[float, float]:
    """Return the seconds between which nine of ten measured steps lie."""
    low, high = timing.measured_over_predicted or UNMEASURED_RANGE
    spread = interval_spread(time, nodes)
    return float(time.step_seconds * low**spread), float(time.step_seconds * high**spread)
