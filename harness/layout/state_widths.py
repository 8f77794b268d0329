"""The widths at which an engine allocates model state, and how it sends that state."""

from dataclasses import dataclass
from typing import Literal

StateKind = Literal["parameters", "gradients", "optimizer"]

# What is a multiple of the number of shards, see harness.cost_model.dp_communication.sent_elements.
Padding = Literal["none", "rows", "elements", "partition"]

STATE_KINDS: tuple[StateKind, ...] = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class StateWidths:
    """The bytes per element that an engine allocates for each kind of model state, before any sharding.

    Where strategy.offload takes gradients, `gradients` is what stays on the device, and the host holds `host_gradients`
    bytes per element of this rank's shard, and `host_buffer_bytes` beside them.
    """

    parameters: int
    frozen: int  # of a parameter that is not trained
    gradients: int
    masters: int  # kept beside the parameters; fp32 parameters that are their own masters do not count
    gathered: int  # of a parameter that was gathered for compute
    # Whether ZeRO stage 3 gathers a parameter for each of its uses; otherwise once for forward, and again for backward.
    gathers_for_each_use: bool = False
    keeps_secondary_shards: bool = False  # from their first use in a step to its update, and not in a micro-batch alone
    padding: Padding = "none"  # with what parameters are padded to equal shards when they are sent
    parameter_alignment: int = 1  # elements to which each parameter of a padded partition is aligned
    buffer_bytes: int = 0  # in total, allocated for communication whatever the size of the model
    backward_buffer_bytes: int = 0  # beside these, from the first gradient of a backward until its end
    reduce_bucket_elements: int = 0  # of DeepSpeed, which reduces a larger gradient by itself
    renews_buffers: bool = False  # allocates gradients and buckets anew in each step, in blocks of other sizes
    recomputes_last_projection: bool = False  # a checkpointed layer runs again to its end; torch stops before its last
    tp_allreduces_per_layer: int = 4  # of hidden states over tensor-parallel ranks, in a layer's forward and backward
    # Whether gradients are reduced beside the backward that computes them, and parameters of ZeRO stage 3 are gathered
    # ahead of their use; otherwise compute waits for both.
    overlaps_reduction: bool = True
    prefetches_parameters: bool = True
    all_reduces_gradients: bool = False  # in stages 1 and 2, which by the paper reduce a gradient to its owner
    # Whether stage 2 gathers parameters, and replicas sum gradients, in every micro-batch, not once a step.
    repeats_in_micro_batches: bool = False
    reduces_at_end: bool = False  # whole gradients of a pipeline's stage once a step, after the stage's last backward
    # ZeRO++ (arXiv 2306.10209): whether parameters are gathered as 8-bit integers (qwZ), and among how many devices of
    # a node gradients are exchanged as 4-bit integers before nodes exchange their sums (qgZ), 0 where they are reduced.
    quantizes_gathers: bool = False
    exchange_devices: int = 0
    host_gradients: int = 0
    host_buffer_bytes: int = 0  # in total
