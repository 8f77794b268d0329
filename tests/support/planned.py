"""A node of eight devices in round figures and single plans, for tests and benchmarks of the planner."""

import dataclasses

from harness.config.hardware import FittedHardware, HardwareConfig
from harness.hardware.machine import DescribedCluster
from harness.planner.plan import LayoutPlan, plans

FITTED = FittedHardware(0.8, 0.6, 0.6, 2.5, 0.8, 3e-6, 5e-6, 0.8, 2e-6, 0.8, 1e-5, 0.1)

HARDWARE = HardwareConfig(
    device_name="NVIDIA H100 80GB HBM3",
    memory="80GB",
    memory_bandwidth=3.35e12,
    intra_node_bandwidth=450e9,
    inter_node_bandwidth=50e9,
    host_bandwidth=64e9,
    sources=("round figures",),
    fitted=FITTED,
    fitted_to="nothing",
)


def cluster_of_eight(nodes: int = 1, **changes: object) -> DescribedCluster:
    """Return nodes of eight such devices, with these changes of the hardware."""
    hardware = dataclasses.replace(HARDWARE, **changes)  # type: ignore[arg-type]
    return DescribedCluster("eight", nodes, 8, hardware, "cuda")


def planned(*words: str) -> LayoutPlan:
    """Return the one plan of these overrides."""
    (plan,) = plans(words)
    return plan
