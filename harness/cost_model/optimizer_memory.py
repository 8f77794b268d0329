"""The parameters whose optimizer state a rank has, and the optimizer's temporaries. Imports no torch."""

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.cost_model.transient_buffers import without_data_parallelism
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_numel


def optimizer_parameter_count(model: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> int:
    """Return the number of parameters whose optimizer state is on the rank that has most of them."""
    shards = layout.shard_count("optimizer")
    if layout.partitions_by_parameter:
        return _largest_partition(model, without_data_parallelism(layout), tuple(stages), shards)
    return math.ceil(_local_total(model, without_data_parallelism(layout), tuple(stages)) / shards)


@lru_cache(maxsize=1024)
def _local_total(model: ModelConfig, layout: Layout, stages: tuple[Stage, ...]) -> float:
    return sum([size for stage in stages for size in local_numel(model, layout, stage).values()])


@lru_cache(maxsize=256)
def _largest_partition(model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int) -> int:
    """Return the parameters of the fullest rank, as ZeroRedundancyOptimizer assigns them: the largest one first.

    Each goes to the rank that has fewest, and to the first of several such ranks.
    """
    sizes = [size for stage in stages for size in local_numel(model, layout, stage).values()]
    ranks = [(0.0, rank) for rank in range(shards)]
    for size in sorted(sizes, reverse=True):
        total, rank = ranks[0]
        heapq.heapreplace(ranks, (total + size, rank))
    return math.ceil(max(ranks)[0])


def optimizer_temporary_bytes(config: RunConfig, layout: Layout, parameters: int) -> int:
    """Return the bytes of the optimizer's temporaries."""
    width = config.optimizer.foreach_copies * config.precision.master_bytes
    return 0 if config.train.fused_optimizer else -(-width * parameters // layout.shard_count("optimizer"))
