"""The configuration of hardware: what one device of a cluster and the links between devices can do, for the planner.

A file in conf/cluster has it under `hardware`. Datasheet figures stand by themselves; what was fitted to published
measurements, and only that, stands under `hardware.fitted`.
"""

import dataclasses
import math
from dataclasses import dataclass

from harness.config.byte_size import parse_bytes
from harness.config.validation import require


@dataclass(frozen=True)
class FittedHardware:
    """The parameters of a device and its links that no datasheet prints, at most twelve."""

    matmul_efficiency: float = 0.8  # The share of peak FLOP/s that an endlessly large matrix product reaches.
    attention_efficiency: float = 0.5  # The share of peak FLOP/s that a fused attention kernel reaches in forward.
    memory_efficiency: float = 0.8  # The share of memory_bandwidth that an elementwise kernel reaches.
    kernel_seconds: float = 5e-6  # The time that every kernel takes beside its work.
    intra_node_efficiency: float = 0.8  # The share of intra_node_bandwidth that a ring reaches.
    inter_node_efficiency: float = 0.8  # The share of inter_node_bandwidth that a ring over two nodes reaches.
    intra_node_latency: float = 2e-6  # The seconds of one step of a ring in a node.
    inter_node_latency: float = 1e-5  # The seconds of one step of a ring between nodes.


@dataclass(frozen=True)
class HardwareConfig:
    """One device of a cluster and its links, by datasheets and by a few fitted parameters."""

    device_name: str  # The name of the device as CUDA reports it, which harness.hardware.peak_flops knows.
    memory: str | int | float  # The bytes of device memory, such as 80GB.
    memory_bandwidth: float  # The bytes per second that a device reads and writes in its own memory.
    intra_node_bandwidth: float  # The bytes per second that a device sends to the others of its node.
    inter_node_bandwidth: float  # The bytes per second that a device sends to other nodes.
    sources: tuple[str, ...]  # Where the figures are from.
    # Whether no published training measurement of this device stands behind the fitted parameters.
    datasheet_only: bool = True
    price_per_device_hour: float | None = None  # The price of one device for an hour, in any currency; null if unknown.
    peak_flops: float | None = None  # FLOP/s of dense 16-bit products; null takes those of device_name.
    fitted: FittedHardware = dataclasses.field(default_factory=FittedHardware)

    def __post_init__(self) -> None:
        parse_bytes(self.memory, "cluster.hardware.memory")
        for key in ("memory_bandwidth", "intra_node_bandwidth", "inter_node_bandwidth"):
            value = getattr(self, key)
            rule = "is not a finite number above 0: give the bytes per second of one device, one way"
            require(math.isfinite(value) and value > 0, f"cluster.hardware.{key}", value, rule)

    @property
    def memory_bytes(self) -> int:
        """cluster.hardware.memory in bytes."""
        return parse_bytes(self.memory)
