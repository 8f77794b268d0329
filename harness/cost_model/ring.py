"""What is counted of a collective, and the share of its bytes that a rank sends under a ring algorithm. No torch."""

# A collective of at most this many elements carries norms, flags or counts, which no formula has, unless it exchanges
# tokens: its purpose in the record is the name of the function that called it.
SCALARS = 8

LAYOUT = "layout"  # the purpose of all other collectives, which move the tensors of the layout

# Functions that move the layout's tensors however small: DeepSpeed's stages 1 and 2 cut gradients where partitions end,
# and stage 3 gathers the scales of a quantized vector.
LAYOUT_CALLERS = frozenset({"DeepSpeedZeroOptimizer.allreduce_bucket", "_dist_allgather_fn"})


def ring_fraction(ranks: int) -> float:
    """Return the share that a rank sends of all bytes that are gathered or scattered among so many ranks."""
    return (ranks - 1) / ranks
