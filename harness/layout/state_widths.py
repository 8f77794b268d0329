"""TODO harness.layout.state_widths."""

from dataclasses import dataclass
from typing import Literal

StateKind = Literal["parameters", "gradients", "optimizer"]

STATE_KINDS: tuple[StateKind, ...] = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class StateWidths:
    """Bytes an element that an engine allocates for model state at the width named, before any sharding.

    optimizer counts masters kept beside the parameters; fp32 parameters that are their own masters do not count.
    gathered is the width of a parameter made whole for compute; gathers, how often stage 3 does so a micro-batch.
    buffer_bytes are set aside for communication whatever the model. whole_second_forward: a checkpointed layer runs
    again to its very end, where torch stops before the last projection. Where strategy.offload takes gradients,
    `gradients` is what stays on the device; host_gradients lie on the host, an element of this rank's shard, and beside
    them host_buffer_bytes.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    gathers_per_micro_batch: float = 2  # for forward and again for backward
    buffer_bytes: int = 0
    recomputes_last_projection: bool = False
    tp_allreduces_per_layer: int = 4  # of hidden states over tensor-parallel ranks, in a layer's forward and backward
    host_gradients: int = 0
    host_buffer_bytes: int = 0
