"""The bytes one rank must send in a step, as the papers count them, under ring algorithms."""

from harness.asked import Asked
from harness.config import RunConfig
from harness.engines import Widths
from harness.layout import Layout
from harness.placement import Stage, stages_of_rank
from harness.plan.activations import WIDTH_BYTES
from harness.plan.flops import runs_to_its_end
from harness.sizes import elements, norm_shapes, parameter_count

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
        for operation, moved in tensor_bytes(config, layout, stage).items():
            expected[f"tp {operation}"] = expected.get(f"tp {operation}", 0.0) + moved
        expected["pp send"] = expected.get("pp send", 0.0) + pipeline_bytes(config, layout, stage)
    return expected


def data_bytes(config: RunConfig, layout: Layout, widths: Widths) -> dict[str, float]:
    """By axis. ZeRO (arXiv 1910.02054, section 7); hybrid sharding (arXiv 2304.11277, from its operators).

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
    return {"dp_shard": within, "dp_replicate": across}


def hidden_bytes(config: RunConfig) -> int:
    """Hidden states of one micro-batch, whole."""
    train = config.train
    width = WIDTH_BYTES[config.precision.compute]
    return train.micro_batch * train.seq_len * config.model.hidden_size * width


def tensor_bytes(config: RunConfig, layout: Layout, stage: Stage) -> dict[str, float]:
    """What a stage's layers, embedding, head and loss sum up over tensor-parallel ranks (arXiv 1909.08053, section 3).

    Two all-reduces of the hidden states a layer in forward and two in backward, one for the embedding in forward and
    one for the head in backward. A checkpointed layer runs its first again; torch stops the second forward before the
    last, whose result nothing in backward needs unless it is dropped from. Sequence parallelism (arXiv 2205.05198)
    puts a reduce-scatter and an all-gather in the place of each all-reduce; of those a second forward gathers both
    inputs and scatters its sums; the gradients of norms and of learned positions are summed once a step. A bias is
    added before its product is summed, a share of it on every rank, and so has a whole gradient there.
    """
    if layout.tp == 1:
        return {}
    if config.model.asked is not None:
        return planned_bytes(config, layout, config.model.asked)
    train, model = config.train, config.model
    micro_batches = layout.accumulation(train)
    sums = 4 * stage.layers + stage.holds_embedding + stage.holds_head
    summed_again = 2 if runs_to_its_end(model) else 1  # of a layer's two sums
    full = stage.layers if config.checkpointing.name == "full" else 0
    again = full * summed_again
    hidden = micro_batches * hidden_bytes(config)
    small = LOSS_SUMS * micro_batches * train.micro_batch * train.seq_len * 4 if stage.holds_head else 0
    once = ring_share(layout.tp)  # an all-reduce is two of these
    if not layout.sequence_parallel:
        return {"all_reduce": 2 * once * ((sums + again) * hidden + small)}
    beside = (2 * stage.layers + stage.holds_head) * elements(norm_shapes("norm", model))
    if stage.holds_embedding and model.kind.learned_positions:
        beside += model.context_length * model.hidden_size
    return {
        "all_reduce": 2 * once * (small + beside * WIDTH_BYTES[config.precision.reduce]),
        "all_gather": once * (sums + 2 * full) * hidden,
        "reduce_scatter": once * (sums + again) * hidden,
    }


def planned_bytes(config: RunConfig, layout: Layout, asked: Asked) -> dict[str, float]:
    """Along a model's own plan: every matrix sums by itself, by columns its input's gradient, by rows its output.

    A table of the vocabulary sums its rows' output; a gathered output is gathered in forward. The second forward of a
    layer sums again what it runs to its end.
    """
    train, once = config.train, ring_share(layout.tp)
    full = config.checkpointing.name == "full"
    summed = gathered = 0.0
    for path, cut in asked.tensor_plan.items():
        weight = asked.shapes.get(f"{path}.weight")
        if weight is None:
            continue
        outputs, inputs = weight
        if cut in ("column", "gathered"):
            summed += inputs
        if cut == "gathered":
            gathered += outputs
        if cut == "row":
            summed += outputs * (2 if full and asked.in_layers(path) and path not in asked.unfinished else 1)
        if cut == "vocabulary":
            summed += inputs
    tokens = layout.accumulation(train) * train.micro_batch * train.seq_len * WIDTH_BYTES[config.precision.compute]
    return {"all_reduce": 2 * once * tokens * summed, "all_gather": once * tokens * gathered}


def pipeline_bytes(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """Hidden states to the next stage in forward, their gradient to the one before in backward, each micro-batch."""
    neighbours = (not stage.holds_head) + (not stage.holds_embedding)
    return float(neighbours * layout.accumulation(config.train) * hidden_bytes(config))
