"""The seconds of a step in which a device waits for copies to and from the host under offload. Imports no torch.

The copies of model state are counted whole, as none of them is certain to have other work beside it. Those of
activations run beside the passes that make and use them, so that only what exceeds these is left. Left out are the
host's own limits: cores that are too slow for the update, and memory channels that devices share.
"""

from dataclasses import dataclass

from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths

# The share of a PCIe link's bytes that are data: packets of 256 bytes with up to 24 of headers, sequence number and
# checksums (PCI Express Base Specification, transaction and data link layers).
PAYLOAD = 256 / 280


@dataclass(frozen=True)
class OffloadedWork:
    """What a rank moves to the host and back."""

    parameters: float  # of the fullest stage, on one tensor-parallel rank, before sharding
    activation_bytes: float  # of a micro-batch, in the fullest stage
    micro_batches: int
    forward_seconds: float  # of a micro-batch
    backward_seconds: float


def copy_seconds(
    config: RunConfig, layout: Layout, widths: StateWidths, host_bandwidth: float, work: OffloadedWork
) -> float:
    """Return the seconds of copies that nothing hides.

    Under offload of the optimizer (ZeRO-Offload, arXiv 2101.06840), a rank sends its share of gradients to the host
    once a step and takes its share of parameters back. Under offload of parameters it takes its shard for each
    gather, in forward and in backward, and sends its shard of gradients, in every micro-batch.
    """
    precision, seconds = config.precision, 0.0
    host_bandwidth *= PAYLOAD
    if layout.offload == "optimizer":
        shards = max(layout.shard_count("optimizer"), 1)
        seconds += work.parameters / shards * (precision.reduce_bytes + precision.compute_bytes) / host_bandwidth
    elif layout.offload == "parameters":
        shard = work.parameters / max(layout.shard_count("parameters"), 1)
        per_micro_batch = shard * (2 * widths.gathered + precision.reduce_bytes)
        seconds += work.micro_batches * per_micro_batch / host_bandwidth
    if config.checkpointing.offload_activations:
        one_way = work.activation_bytes / host_bandwidth
        exposed = max(0.0, one_way - work.forward_seconds) + max(0.0, one_way - work.backward_seconds)
        seconds += work.micro_batches * exposed
    return seconds


def host_update_seconds(update_seconds: float, memory_bandwidth: float, host_bandwidth: float) -> float:
    """Return the seconds of an update on the host whose bytes take so long in a device's memory.

    A rank's part of the host's memory bandwidth is taken to be that of its link: a node's memory channels over its
    devices are about as fast as these.
    """
    return update_seconds * memory_bandwidth / host_bandwidth
