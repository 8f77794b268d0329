"""What a kernel does, as far as its time depends on it, and its seconds on a device by the planner's own functions.

Left out, as in the planner, are the differences between kernels that move equally many bytes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from harness.config.hardware import HardwareConfig
from harness.cost_model.timing.collectives import RankGroup, all_reduce_seconds, gather_seconds, send_seconds
from harness.cost_model.timing.kernels import fused_attention_flops, kernel_rates
from harness.cost_model.timing.offload_time import PAYLOAD, host_update_seconds

BACKWARD_PRODUCTS = 2.5  # of a fused attention kernel's backward, in units of its forward's (arXiv 2205.14135)


class Product(NamedTuple):
    """A batch of products of an (m, k) with a (k, n) matrix in a dtype by torch's name."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    width: int  # bytes per element

    def seconds(self, hardware: HardwareConfig) -> float:
        """Return the seconds of one kernel that computes the whole batch."""
        rates = kernel_rates(hardware, self.dtype)
        single = rates.product_seconds(self.m, self.n, self.k, self.width) - rates.kernel_seconds
        return self.batch * single + rates.kernel_seconds


class AttentionKernel(NamedTuple):
    """A fused attention kernel, forward or backward; the mask leaves a share of the scores to be computed."""

    queries: int  # of all sequences of the batch
    keys: int  # that a query may see
    heads: int
    head_dim: int
    computed_share: float
    dtype: str
    is_backward: bool

    def seconds(self, hardware: HardwareConfig) -> float:
        """Return the seconds as the planner has them: backward is two kernels."""
        rates = kernel_rates(hardware, self.dtype)
        work = fused_attention_flops(self.queries, self.keys, self.heads, self.head_dim, self.computed_share)
        if self.is_backward:
            return BACKWARD_PRODUCTS * work / rates.attention_backward_flops + 2 * rates.kernel_seconds
        return work / rates.attention_flops + rates.kernel_seconds


class Movement(NamedTuple):
    """A kernel that does little more than read and write so many bytes of device memory."""

    bytes: int

    def seconds(self, hardware: HardwareConfig) -> float:
        """Return the seconds of the kernel."""
        bandwidth = hardware.memory_bandwidth * hardware.fitted.memory_efficiency
        return self.bytes / bandwidth + hardware.fitted.kernel_seconds


class HostLinkCopy(NamedTuple):
    """A copy between device and host."""

    bytes: int

    def seconds(self, hardware: HardwareConfig) -> float:
        """Return the seconds of the copy, which are 0 where the bandwidth to the host is not known."""
        return self.bytes / (hardware.host_bandwidth * PAYLOAD) if hardware.host_bandwidth else 0.0


class HostWork(NamedTuple):
    """An operator that the host itself carries out, such as the update of offloaded state, on so many bytes."""

    bytes: int

    def seconds(self, hardware: HardwareConfig) -> float:
        """Return the seconds, in which the host launches nothing; 0 where the bandwidth to the host is not known."""
        if not hardware.host_bandwidth:
            return 0.0
        update = self.bytes / (hardware.memory_bandwidth * hardware.fitted.memory_efficiency)
        return host_update_seconds(update, hardware.memory_bandwidth, hardware.host_bandwidth)


class Collective(NamedTuple):
    """A collective of so many bytes, counted as in harness.measure.collective_rules, among global ranks."""

    operation: str
    bytes: int
    ranks: tuple[int, ...]

    def seconds(self, hardware: HardwareConfig, gpus_per_node: int) -> float:
        """Return the seconds of the collective's ring."""
        group = group_of_ranks(self.ranks, gpus_per_node)
        if self.operation == "all_reduce":
            return all_reduce_seconds(self.bytes, group, hardware)
        return gather_seconds(self.bytes, group, hardware)


TransferPart = tuple[Literal["send", "receive"], int, int]  # its direction, the other rank, and its bytes


class Transfers(NamedTuple):
    """Sends to ranks and receives from them that one kernel carries out."""

    rank: int
    parts: tuple[TransferPart, ...]

    def seconds(self, hardware: HardwareConfig, gpus_per_node: int) -> float:
        """Return the seconds of the slowest transfer; links carry both directions at once."""
        return max(self._part_seconds(peer, size, hardware, gpus_per_node) for _, peer, size in self.parts)

    def _part_seconds(self, peer: int, size: int, hardware: HardwareConfig, gpus_per_node: int) -> float:
        in_node = self.rank // gpus_per_node == peer // gpus_per_node
        return send_seconds(size, 1 if in_node else gpus_per_node, gpus_per_node, hardware)


Communication = Collective | Transfers
Work = Product | AttentionKernel | Movement | HostLinkCopy | HostWork | Communication


@lru_cache(maxsize=1024)
def group_of_ranks(ranks: Sequence[int], gpus_per_node: int) -> RankGroup:
    """Return the group of global ranks, which fill one node after another."""
    return RankGroup(len(ranks), len({rank // gpus_per_node for rank in ranks}))


@lru_cache(maxsize=65536, typed=True)  # a copy and a movement of equally many bytes are equal tuples
def work_seconds(work: Work, hardware: HardwareConfig, gpus_per_node: int) -> float:
    """Return the seconds of a kernel where nothing else runs.

    Raise UserError if the device's peak in a product's dtype is unknown.
    """
    if isinstance(work, Communication):
        return work.seconds(hardware, gpus_per_node)
    return work.seconds(hardware)
