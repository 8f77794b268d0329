"""The bytes one rank must send in a step, as the papers count them, under ring algorithms."""

from harness.config import RunConfig
from harness.engines import Widths
from harness.layout import Layout
from harness.placement import Stage, stages_of_rank
from harness.sizes import parameter_count

WIDTH_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOSS_SUMS = 3  # of a number a token in fp32, for a loss over logits cut along the vocabulary: maximum, sum, target's


def ring_share(ranks: int) -> float:
    """What a rank sends of every byte that is gathered or scattered among so many."""
    return (ranks - 1) / ranks


def expected_bytes(config: RunConfig, layout: Layout, widths: Widths, rank: int) -> dict[str, float]:
    """Bytes that this rank must send in a step, by axis. Left out: gradient norms, flags and padding."""
    return {
        "data": data_bytes(config, layout, widths),
        "tp": sum(tensor_bytes(config, layout, stage) for stage in stages_of_rank(config.model, layout, rank)),
        "pp": sum(pipeline_bytes(config, layout, stage) for stage in stages_of_rank(config.model, layout, rank)),
    }


def data_bytes(config: RunConfig, layout: Layout, widths: Widths) -> float:
    """ZeRO (arXiv 1910.02054, section 7); hybrid sharding (arXiv 2304.11277, from its operators).

    Stages 0 and 1 synchronise once a step, stages 2 and 3 reduce-scatter every micro-batch.
    """
    parameters = parameter_count(config.model)
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


def hidden_bytes(config: RunConfig) -> int:
    """Hidden states of one micro-batch, whole."""
    train = config.train
    width = WIDTH_BYTES[config.precision.compute]
    return train.micro_batch * train.seq_len * config.model.hidden_size * width


def tensor_bytes(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """What a stage's layers, embedding, head and loss sum up over tensor-parallel ranks (arXiv 1909.08053, section 3).

    Two all-reduces of the hidden states a layer in forward and two in backward, one for the embedding in forward and
    one for the head in backward. A checkpointed layer runs its first again; torch stops the second forward before the
    last, whose result nothing in backward needs. Sequence parallelism (arXiv 2205.05198) puts a reduce-scatter and an
    all-gather, together as many bytes, in the place of each all-reduce; again its second forward leaves out the last
    reduce-scatter; the gradients of norms are summed once a step.
    """
    if layout.tp == 1:
        return 0.0
    train, model = config.train, config.model
    again = 0.0
    if config.checkpointing.name == "full":
        again = 1.5 if layout.sequence_parallel else 1.0
    sums = (4 + again) * stage.layers + stage.holds_embedding + stage.holds_head
    moved = sums * hidden_bytes(config)
    if stage.holds_head:
        moved += LOSS_SUMS * train.micro_batch * train.seq_len * 4
    moved *= layout.accumulation(train)
    if layout.sequence_parallel:
        norms = 2 * stage.layers + stage.holds_head
        moved += norms * model.hidden_size * WIDTH_BYTES[config.precision.reduce]
    return 2 * ring_share(layout.tp) * moved


def pipeline_bytes(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """Hidden states to the next stage in forward, their gradient to the one before in backward, each micro-batch."""
    neighbours = (not stage.holds_head) + (not stage.holds_embedding)
    return float(neighbours * layout.accumulation(config.train) * hidden_bytes(config))
