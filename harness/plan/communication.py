"""The bytes one rank must send in a step, as the papers count them; under ring algorithms, data-parallel layouts."""

from harness.config import RunConfig
from harness.engines import Widths
from harness.layout import Layout

WIDTH_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def ring_share(ranks: int) -> float:
    """What a rank sends of every byte that is gathered or scattered among so many."""
    return (ranks - 1) / ranks


def expected_bytes(config: RunConfig, layout: Layout, widths: Widths, parameters: int) -> float:
    """Bytes a rank and step (ZeRO: arXiv 1910.02054 section 7; hybrid sharding: arXiv 2304.11277, from its operators).

    Stages 0 and 1 synchronise once a step, stages 2 and 3 reduce-scatter every micro-batch. Left out: gradient norms,
    flags and padding.
    """
    micro_batches = layout.accumulation(config.train)
    reduced = parameters * WIDTH_BYTES[config.precision.reduce]
    gathered = parameters * widths.gathered
    reductions, gathers = {
        0: (0, 0),
        1: (1, 1),
        2: (micro_batches, 1),
        3: (micro_batches, widths.gathers * micro_batches),
    }[layout.zero_stage]
    within = ring_share(layout.dp_shard) * (reductions * reduced + gathers * gathered)
    across = 2 * ring_share(layout.dp_replicate) * reduced / layout.dp_shard
    return within + across
