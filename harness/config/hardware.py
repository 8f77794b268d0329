"""The configuration of hardware: what one device of a cluster and the links between devices can do, for the planner.

A file in conf/cluster has it under `hardware`. Figures of datasheets stand by themselves; what was fitted to published
measurements, and only that, stands under `hardware.fitted`.
"""

from dataclasses import dataclass, field
from typing import Annotated

from harness.config.from_dict import Finite, is_above_zero, rule
from harness.util.text import Size, parse_bytes

Bandwidth = Annotated[
    float, rule(is_above_zero, "is not a finite number above 0: give the bytes per second of one device, one way")
]
_ABOVE_ZERO = rule(is_above_zero, "is not a finite number above 0: choose one, or null")
AboveZero = Annotated[float, _ABOVE_ZERO]
Cores = Annotated[int, _ABOVE_ZERO]


@dataclass(frozen=True)
class FittedHardware:
    """The parameters of a device and its links that no datasheet has, at most twelve."""

    matmul_efficiency: Finite  # The share of peak FLOP/s that an endlessly large matrix product reaches.
    attention_efficiency: Finite  # The share of peak FLOP/s that FlashAttention-2 reaches with endlessly large heads.
    cudnn_attention_efficiency: Finite  # The same of cuDNN's kernel where torch prefers it, elsewhere of the former.
    # The FLOP/s of a fused attention kernel's backward in units of its forward's.
    attention_backward_ratio: Finite
    memory_efficiency: Finite  # The share of memory_bandwidth that kernels reach.
    kernel_seconds: Finite  # The time of a kernel beside its operations and bytes.
    launch_seconds: Finite  # The time in which the host launches one kernel.
    intra_node_efficiency: Finite  # The share of intra_node_bandwidth that a ring in a node reaches.
    intra_node_latency: Finite  # The seconds of one step of a ring between devices of a node.
    inter_node_efficiency: Finite  # The share of inter_node_bandwidth that a ring over two nodes reaches.
    inter_node_latency: Finite  # The seconds of one step of a ring between nodes.
    # The share of a collective's time by which it slows down the kernels that run beside it.
    overlap_slowdown: Finite


@dataclass(frozen=True)
class HardwareConfig:
    """One device of a cluster and its links, by datasheets and by a few fitted parameters."""

    device_name: str  # The name of the device as CUDA reports it, by which its peak FLOP/s are known.
    memory: Size  # The bytes of device memory, such as 80GiB.
    memory_bandwidth: Bandwidth  # The bytes per second that a device reads and writes in its own memory.
    intra_node_bandwidth: Bandwidth  # The bytes per second that a device sends to the others of its node.
    inter_node_bandwidth: Bandwidth  # The bytes per second that a device sends to other nodes.
    sources: tuple[str, ...]  # Where the figures of datasheets are from.
    fitted: FittedHardware  # The parameters that no datasheet has.
    fitted_to: str  # The measurements behind `fitted`, and how it was fitted to them.
    # Whether no published training measurement of this device stands behind `fitted`.
    datasheet_only: bool = True
    # The major number of CUDA's compute capability, by which libraries choose the size of their workspaces; 9, that of
    # Hopper, also for devices without one.
    compute_capability: int = 9
    # The bytes per second that a device sends to its host's memory, and as many back; null means that copies of offload
    # are not known, and that no search offloads.
    host_bandwidth: AboveZero | None = None
    # The bytes of a host's memory, such as 2000GB, which its devices share; null means that no plan checks it.
    host_memory: Size | None = None
    # The price of one device for an hour, in any currency; null if unknown.
    price_per_device_hour: AboveZero | None = None
    # FLOP/s of dense products in the dtype of compute; null means that device_name says them, as in run records.
    peak_flops: AboveZero | None = None
    # The only dtype, by torch's name, that peak_flops holds for; null means every one.
    peak_flops_dtype: str | None = None
    # Whether `harness calibrate` measured these figures. Runs on such a device take them before other files'.
    calibrated: bool = False
    # The processor of a machine whose ranks compute on a CPU; null on GPUs. Ranks of a node share memory,
    # memory_bandwidth and peak_flops, which describe the whole machine.
    processor: str | None = None
    cores: Cores | None = None  # The cores that the ranks of such a machine share; null on GPUs.
    notes: str = field(default="", compare=False)  # What a reader of plans should know about these figures.

    @property
    def is_cpu(self) -> bool:
        """Whether ranks compute on their machine's cores, which they share and which launch and run kernels in turn."""
        return self.device_name == "cpu"

    @property
    def memory_bytes(self) -> int:
        """cluster.hardware.memory in bytes."""
        return parse_bytes(self.memory)
