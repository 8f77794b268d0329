"""Simulated ranks that also find the smallest device on which their allocations can be served."""

import dataclasses
from typing import Any

from harness.cost_model.memory import PROCESS_BYTES
from harness.simulator.process import StepRequest
from tests.support.simulated_steps import main


def report_least_capacity() -> None:
    """Make simulated ranks report the least capacity as the active bytes, which the simulator does not know."""
    from harness.simulator import rank
    from harness.simulator.caching_allocator import OutOfDeviceMemoryError

    measure = rank.peaks_of_step

    def with_least_capacity(request: StepRequest, *arguments: Any) -> dict[str, Any]:
        peaks = measure(request, *arguments)
        low, high = peaks["peak_allocated_bytes"], peaks["peak_reserved_bytes"]
        while high - low > low // 100:
            middle = (low + high) // 2
            try:
                measure(dataclasses.replace(request, device_bytes=middle + PROCESS_BYTES["cuda"]), *arguments)
                high = middle
            except OutOfDeviceMemoryError:
                low = middle
        return peaks | {"peak_active_bytes": high}

    rank.peaks_of_step = with_least_capacity


if __name__ == "__main__":
    main(report_least_capacity)
