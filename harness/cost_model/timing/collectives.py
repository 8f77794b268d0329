"""The seconds of collectives among the devices of a group.

A ring has a latency for every step and a bandwidth, as NCCL's own tuning has it (src/graph/tuning.cc): steps between
nodes and in them have their own latency, and the bandwidth is that of the narrowest link, where every device of the
group in a node uses a network card of its own. Left out are trees, reductions in the switch (NVLS, SHARP), and the
choice of protocol by size.
"""

from functools import lru_cache

from harness.config.hardware import HardwareConfig
from harness.cost_model.node_groups import RankGroup


@lru_cache(maxsize=4096)
def ring(group: RankGroup, hardware: HardwareConfig) -> tuple[float, float]:
    """Return the seconds in which one element goes around the ring, and the bytes per second that each rank sends."""
    fitted = hardware.fitted
    in_node = hardware.intra_node_bandwidth * fitted.intra_node_efficiency
    if group.nodes == 1:
        return (group.ranks - 1) * fitted.intra_node_latency, in_node
    latency = group.nodes * fitted.inter_node_latency + (group.ranks - group.nodes) * fitted.intra_node_latency
    between = group.ranks / group.nodes * hardware.inter_node_bandwidth * fitted.inter_node_efficiency  # by all cards
    return latency, min(in_node, between)


def gather_seconds(total_bytes: float, group: RankGroup, hardware: HardwareConfig) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of so many bytes, all ranks' together."""
    if group.ranks == 1:
        return 0.0
    latency, bandwidth = ring(group, hardware)
    return latency + (group.ranks - 1) / group.ranks * total_bytes / bandwidth


def all_to_all_seconds(sent_bytes: float, group: RankGroup, hardware: HardwareConfig) -> float:
    """Return the seconds in which each rank sends so many bytes, an equal part to every rank, itself included.

    Parts for other nodes and those for the own one are sent side by side. There is one message to each rank.
    """
    fitted, in_node = hardware.fitted, group.ranks / group.nodes
    outside, inside = (group.ranks - in_node) / group.ranks, (in_node - 1) / group.ranks
    latency = (in_node - 1) * fitted.intra_node_latency + (group.ranks - in_node) * fitted.inter_node_latency
    return latency + sent_bytes * max(
        inside / (hardware.intra_node_bandwidth * fitted.intra_node_efficiency),
        outside / (hardware.inter_node_bandwidth * fitted.inter_node_efficiency) if outside else 0.0,
    )


def all_reduce_seconds(total_bytes: float, group: RankGroup, hardware: HardwareConfig) -> float:
    """Return the seconds of an all-reduce, a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(total_bytes, group, hardware)


def send_seconds(sent_bytes: float, stride: int, gpus_per_node: int, hardware: HardwareConfig) -> float:
    """Return the seconds of a transfer to the rank `stride` further, where all devices of a node send at once."""
    fitted = hardware.fitted
    if stride < gpus_per_node:
        bandwidth = hardware.intra_node_bandwidth * fitted.intra_node_efficiency
        return fitted.intra_node_latency + sent_bytes / bandwidth
    return fitted.inter_node_latency + sent_bytes / (hardware.inter_node_bandwidth * fitted.inter_node_efficiency)
