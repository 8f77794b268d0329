"""What lies on the host and not on the device, where the device has a memory of its own. Imports no torch.

Model state: ZeRO-Offload (arXiv 2101.06840) and fully_shard's CPUOffloadPolicy. Activations: all that decoder layers
keep, fetched again a layer at a time. Derived; nothing of it was measured on a GPU.
"""

import dataclasses
from collections.abc import Sequence

from harness.config import CheckpointingConfig
from harness.engines import Widths
from harness.layout import Layout
from harness.placement import Stage
from harness.plan.activations import Pass
from harness.plan.kept import Activations, embedding_bytes, layers_bytes


def offloaded_bytes(one: Pass, stage: Stage, checkpointing: CheckpointingConfig) -> int:
    """Of what a pass through a stage keeps, what its layers do; what the embedding keeps stays on the device."""
    return layers_bytes(one, stage, checkpointing) - embedding_bytes(one, stage)


def without_offloaded(kept: Activations, bytes_away: int, layers: int) -> Activations:
    """What is left on the device: in the last layer's backward its own part, fetched, is there."""
    others = bytes_away - bytes_away // layers
    return dataclasses.replace(
        kept,
        before_backward=kept.before_backward - bytes_away,
        in_last_norm=kept.in_last_norm - others,
        in_last_block=kept.in_last_block - others,
        at_last_scores=kept.at_last_scores - others,
    )


def host_gradient_bytes(widths: Widths, layout: Layout, parameters: Sequence[int]) -> list[int]:
    """Of each of a rank's stages."""
    return [-(-widths.host_gradients * number // layout.shards("gradients")) for number in parameters]
