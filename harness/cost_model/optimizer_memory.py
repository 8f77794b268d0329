"""The parameters whose optimizer state a rank has, and the optimizer's temporaries. Imports no torch."""

import math
from collections.abc import Sequence

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_numel


def optimizer_parameter_count(model: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> int:
    """Return the number of parameters whose optimizer state is on the rank that has most of them."""
    shards = layout.shard_count("optimizer")
    sizes = [size for stage in stages for size in local_numel(model, layout, stage).values()]
    if not layout.partitions_by_parameter:
        return math.ceil(sum(sizes) / shards)
    ranks = [0.0] * shards
    for size in sorted(sizes, reverse=True):  # as ZeroRedundancyOptimizer assigns them
        ranks[ranks.index(min(ranks))] += size
    return math.ceil(max(ranks))


def optimizer_temporary_bytes(config: RunConfig, layout: Layout, parameters: int) -> int:
    """Return the bytes of the optimizer's temporaries.

    torch's foreach AdamW computes the roots of all second moments at once; the fused one needs none.
    """
    width = config.precision.master_bytes
    return 0 if config.train.fused_optimizer else -(-width * parameters // layout.shard_count("optimizer"))
