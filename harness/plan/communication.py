"""The bytes one rank must send in a step, as the papers count them, under ring algorithms."""

from harness.config import RunConfig
from harness.engines import Widths
from harness.layout import Layout
from harness.placement import Stage, stages_of_rank, whole
from harness.plan.activations import WIDTH_BYTES
from harness.plan.parts import held_parameter_count
from harness.sizes import parameter_count

LOSS_SUMS = 3  # of a number a token in fp32, for a loss over logits cut along the vocabulary: maximum, sum, target's


def ring_share(ranks: int) -> float:
    """What a rank sends of every byte that is gathered or scattered among so many."""
    return (ranks - 1) / ranks


def expected_bytes(config: RunConfig, layout: Layout, widths: Widths, rank: int) -> dict[str, float]:
    """Bytes that this rank must send in a step: by data-parallel axis, and by axis and operation of the others.

    Left out: gradient norms, flags and padding.
    """
    expected = data_bytes(config, layout, widths)
    for stage in stages_of_rank(config.model, layout, rank):
        for operation, moved in tensor_bytes(config, layout, stage, widths.layer_sums).items():
            expected[f"tp {operation}"] = expected.get(f"tp {operation}", 0.0) + moved
        expected["pp send"] = expected.get("pp send", 0.0) + pipeline_bytes(config, layout, stage)
    return expected


def data_bytes(config: RunConfig, layout: Layout, widths: Widths) -> dict[str, float]:
    """By axis. ZeRO (arXiv 1910.02054, section 7); hybrid sharding (arXiv 2304.11277, from its operators).

    Stages 0 and 1 synchronise once a step, stages 2 and 3 reduce-scatter every micro-batch.
    """
    parameters = parameter_count(config.model)
    if layout.tp > 1:
        parameters = held_parameter_count(config.model, whole(config.model), layout.tp, layout.vocabulary_tp)
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
    return {"dp_shard": within, "dp_replicate": across}


def hidden_bytes(config: RunConfig) -> int:
    """Hidden states of one micro-batch, whole."""
    train = config.train
    width = WIDTH_BYTES[config.precision.compute]
    return train.micro_batch * train.seq_len * config.model.hidden_size * width


def tensor_bytes(config: RunConfig, layout: Layout, stage: Stage, layer_sums: int = 4) -> dict[str, float]:
    """What a stage's layers, embedding, head and loss sum up over tensor-parallel ranks (arXiv 1909.08053, section 3).

    Two all-reduces of the hidden states a layer in forward and two in backward, one for the embedding in forward and
    one for the head in backward. A checkpointed layer runs its first again; torch stops the second forward before the
    last, whose result nothing in backward needs. Sequence parallelism (arXiv 2205.05198) puts a reduce-scatter and an
    all-gather in the place of each all-reduce; of those a second forward gathers both inputs and scatters one sum; the
    gradients of norms are summed once a step. Without vocabulary_parallel embedding, head and loss sum nothing.
    """
    if layout.tp == 1:
        return {}
    train, model = config.train, config.model
    micro_batches = layout.accumulation(train)
    cut = layout.vocabulary_parallel
    sums = layer_sums * stage.layers + cut * (stage.holds_embedding + stage.holds_head)
    again = stage.layers if config.checkpointing.name == "full" else 0
    hidden = micro_batches * hidden_bytes(config)
    small = LOSS_SUMS * micro_batches * train.micro_batch * train.seq_len * 4 if cut and stage.holds_head else 0
    once = ring_share(layout.tp)  # an all-reduce is two of these
    if not layout.sequence_parallel:
        return {"all_reduce": 2 * once * ((sums + again) * hidden + small)}
    norms = (2 * stage.layers + stage.holds_head) * model.hidden_size * WIDTH_BYTES[config.precision.reduce]
    return {
        "all_reduce": 2 * once * (small + norms),
        "all_gather": once * (sums + 2 * again) * hidden,
        "reduce_scatter": once * (sums + again) * hidden,
    }


def pipeline_bytes(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """Hidden states to the next stage in forward, their gradient to the one before in backward, each micro-batch."""
    neighbours = (not stage.holds_head) + (not stage.holds_embedding)
    return float(neighbours * layout.accumulation(config.train) * hidden_bytes(config))
