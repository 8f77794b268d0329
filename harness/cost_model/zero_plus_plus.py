"""The bytes that DeepSpeed's stage 3 sends of quantized parameters and gradients (ZeRO++, arXiv 2306.10209). No torch.

Quantized parameters (qwZ) are 8-bit integers, each block of them with a scale in fp32 (partition_parameters.py,
CUDAQuantizer). Quantized gradients (qgZ) are 4-bit integers with such scales: the ranks of a node exchange them and sum
what they received, then ranks in the same place of all nodes exchange the sums (coalesced_collectives.py,
all_to_all_quant_reduce). Gradients of vectors are reduced as they are.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import count

from harness.config.schema import RunConfig
from harness.cost_model.ring import ring_fraction
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_shapes

SCALE_BYTES, MOST_BLOCK = 4, 8000  # of a block's scale, and the elements of a block (target_group_size)
WEIGHT_BYTES, GRADIENT_BYTES = 1, 0.5  # an element
FP16_BYTES = 2
UNIT = 8  # elements: a shard is a multiple of them


@lru_cache(maxsize=1024)
def blocks_of(elements: int) -> int:
    """Return into how many equal blocks a shard is cut, each of a multiple of UNIT elements."""
    return next(blocks for blocks in count(-(-elements // MOST_BLOCK)) if elements % (UNIT * blocks) == 0)


def parameter_bytes(config: RunConfig, layout: Layout, stage: Stage, shards: int) -> dict[str, int]:
    """Return the bytes that a gathering of each module's own parameters among so many ranks moves, by the module.

    They are quantized together.
    """
    sizes = defaultdict[str, int](int)
    for name, shape in local_shapes(config.model, layout, stage, 0).items():
        sizes[name.rpartition(".")[0]] += math.prod(shape)
    return {
        module: WEIGHT_BYTES * size + SCALE_BYTES * shards * blocks_of(size // shards) for module, size in sizes.items()
    }


def exchanged_bytes(shapes: Iterable[tuple[int, ...]], shards: int, devices: int) -> tuple[float, float]:
    """Return the bytes of matrices' gradients that a rank sends to the others of its node, and to other nodes.

    There are so many shards in all, and so many in a node. A block is at most the shorter side of a matrix.
    """
    moved = sum(
        GRADIENT_BYTES * math.prod(shape) + SCALE_BYTES * max(*shape, shards) for shape in shapes if len(shape) > 1
    )
    return ring_fraction(devices) * moved, ring_fraction(shards // devices) * moved / devices


def exchange_buffer_width(shards: int, devices: int) -> float:
    """Return the bytes for each element of a gradient that its exchange takes at a time, 0 if nothing is exchanged.

    They are the integers that are sent and received among the devices of a node, their sums as sent and received by
    nodes, these in fp16, and two sums of what the nodes have in fp16.
    """
    return 2 * GRADIENT_BYTES * (1 + 1 / devices) + FP16_BYTES * (1 / devices + 2 / shards) if devices else 0.0


def undivided(shapes: Mapping[str, tuple[int, ...]], shards: int) -> str:
    """Return the name and shape of the first parameter that cannot be quantized in so many shards, else nothing.

    Each shard is whole units, and each rank sends as many scales of a matrix to every other rank.
    """
    for name, shape in shapes.items():
        if math.prod(shape) % (UNIT * shards) or (len(shape) > 1 and max(shape) % shards):
            return f"{name} of {'x'.join(map(str, shape))}"
    return ""
