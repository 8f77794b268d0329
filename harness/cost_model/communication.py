"""The bytes one rank must send in a step, as the papers count them, under ring algorithms."""

from collections import defaultdict

from harness.config.hf_model_info import HFModelInfo
from harness.config.schema import RunConfig
from harness.cost_model.activations import WIDTH_BYTES
from harness.cost_model.flops import recomputed_layers, recomputes_last_projection
from harness.layout.layout import Layout
from harness.layout.parameters import norm_shapes, numel
from harness.layout.partition import Stage, local_numel, stages_of_rank
from harness.layout.state_widths import StateWidths

# What a layout moves is tensors. A call of no more elements than this carries norms, flags, counts: no formula has it,
# so it is named by the function that called it.
SCALARS = 8

LAYOUT = "layout"  # the purpose of all other calls

LOSS_SUMS = 3  # of a number a token in fp32, for a loss over logits cut along the vocabulary: maximum, sum, target's


def ring_fraction(ranks: int) -> float:
    """What a rank sends of every byte that is gathered or scattered among so many."""
    return (ranks - 1) / ranks


def expected_bytes(config: RunConfig, layout: Layout, widths: StateWidths, rank: int) -> dict[str, float]:
    """Bytes that this rank must send in a step: by data-parallel axis, and by axis and operation of the others.

    Left out: gradient norms, flags and padding.
    """
    expected: defaultdict[str, float] = defaultdict(float)
    for stage in stages_of_rank(config.model, layout, rank):
        for axes, moved in dp_bytes(config, layout, widths, stage).items():
            expected[axes] += moved
        for operation, moved in tp_bytes(config, layout, stage, widths.tp_allreduces_per_layer).items():
            expected[f"tp {operation}"] += moved
        expected["cp"] += cp_bytes(config, layout, stage)
        expected["pp send"] += pipeline_bytes(config, layout, stage)
    return dict(expected)


def dp_bytes(config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage) -> dict[str, float]:
    """By axes. ZeRO (arXiv 1910.02054, section 7); hybrid sharding (arXiv 2304.11277, from its operators).

    Stages 0 and 1 synchronise once a step, stages 2 and 3 reduce-scatter every micro-batch; copies of shards once.
    """
    parameters = sum(local_numel(config.model, layout, stage).values())
    micro_batches = layout.grad_accumulation_steps(config.train)
    reduced = parameters * WIDTH_BYTES[config.precision.reduce]
    gathered = parameters * widths.gathered
    reductions, gathers = {
        0: (0, 0),
        1: (1, 1),
        2: (micro_batches, 1),
        3: (micro_batches, widths.gathers_per_micro_batch * micro_batches),
    }[layout.zero_stage]
    shards, replicas = layout.axes_size(layout.sharding_axes), layout.axes_size(layout.replica_axes)
    within = ring_fraction(shards) * (reductions * reduced + gathers * gathered)
    across = 2 * ring_fraction(replicas) * reduced / shards
    groups = {layout.group_name(*layout.sharding_axes): within, layout.group_name(*layout.replica_axes): across}
    return {axes: moved for axes, moved in groups.items() if axes}


def hidden_bytes(config: RunConfig, layout: Layout) -> int:
    """Hidden states of one micro-batch on a rank: of its part of the sequence, all of them."""
    train = config.train
    width = WIDTH_BYTES[config.precision.compute]
    return train.micro_batch * train.seq_len // layout.cp * config.model.hidden_size * width


def tp_bytes(config: RunConfig, layout: Layout, stage: Stage, layer_sums: int = 4) -> dict[str, float]:
    """What a stage's layers, embedding, head and loss sum up over tensor-parallel ranks (arXiv 1909.08053, section 3).

    Two all-reduces of the hidden states a layer in forward and two in backward, one for the embedding in forward and
    one for the head in backward. A layer that is called again, selectively too, runs its first again; torch stops the
    second forward before the last, whose result nothing in backward needs unless it is dropped from. Sequence
    parallelism (arXiv 2205.05198) puts a reduce-scatter and an all-gather in the place of each all-reduce; of those a
    second forward gathers both inputs and scatters its sums; the gradients of norms and of learned positions are summed
    once a step, by fully_shard in every micro-batch, as wide as it makes them. A bias is added before its product is
    summed, a share of it on every rank, and so has a whole gradient there. Without vocabulary_parallel embedding, head
    and loss sum nothing.
    """
    if layout.tp == 1:
        return {}
    if config.model.asked is not None:
        return hf_tp_bytes(config, layout, config.model.asked)
    train, model = config.train, config.model
    micro_batches = layout.grad_accumulation_steps(train)
    cut = layout.vocabulary_parallel
    sums = layer_sums * stage.layers + cut * (stage.holds_embedding + stage.holds_head)
    called = recomputed_layers(config, layout, stage) if config.checkpointing.name != "attention" else 0
    again = called * (2 if recomputes_last_projection(config) else 1)  # of a layer's two sums
    hidden = micro_batches * hidden_bytes(config, layout)
    tokens = train.micro_batch * train.seq_len // layout.cp
    small = LOSS_SUMS * micro_batches * tokens * 4 if cut and stage.holds_head else 0
    if train.loss_chunks > 1:  # each part runs a second time, and may be so small that its sums count as scalars
        small *= 2 * (tokens // train.loss_chunks > SCALARS)
    once = ring_fraction(layout.tp)  # an all-reduce is two of these
    if not layout.sequence_parallel:
        return {"all_reduce": 2 * once * ((sums + again) * hidden + small)}
    beside = (2 * stage.layers + stage.holds_head) * numel(norm_shapes("norm", model))
    if stage.holds_embedding and model.architecture.learned_positions:
        beside += model.context_length * model.hidden_size
    if layout.data_parallel == "fsdp":
        beside *= micro_batches * WIDTH_BYTES[config.precision.compute]
    else:
        beside *= WIDTH_BYTES[config.precision.reduce]
    return {
        "all_reduce": 2 * once * (small + beside),
        "all_gather": once * (sums + 2 * called) * hidden,
        "reduce_scatter": once * (sums + again) * hidden,
    }


def cp_bytes(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """What a stage's layers gather of keys and values along the sequence, and scatter of their gradients.

    All-gather in forward, again in a second forward of layer or attention, reduce-scatter in backward (Llama 3, arXiv
    2407.21783, section 3.3.2).
    """
    if layout.cp == 1:
        return 0.0
    train, model = config.train, config.model
    groups = 2 * model.num_key_value_heads * model.head_dim // layout.tp
    tokens = layout.grad_accumulation_steps(train) * train.micro_batch * train.seq_len
    passes = 2 * stage.layers + recomputed_layers(config, layout, stage)
    return ring_fraction(layout.cp) * passes * tokens * groups * WIDTH_BYTES[config.precision.compute]


def hf_tp_bytes(config: RunConfig, layout: Layout, asked: HFModelInfo) -> dict[str, float]:
    """Along a model's own plan: every matrix sums by itself, by columns its input's gradient, by rows its output.

    A table of the vocabulary sums its rows' output; a gathered output is gathered in forward. The second forward of a
    layer, where it has one, sums and gathers again what it runs to its end.
    """
    train, once = config.train, ring_fraction(layout.tp)
    called_again = tuple(
        f"{path}." for index, path in enumerate(asked.layers) if config.checkpointing.recomputes_layer(index)
    )
    summed = gathered = 0.0
    for path, cut in asked.tensor_plan.items():
        weight = asked.shapes.get(f"{path}.weight")
        if weight is None:
            continue
        outputs, inputs = weight
        forwards = 2 if path.startswith(called_again) and path not in asked.unfinished else 1
        if cut in ("column", "gathered"):
            summed += inputs
        if cut == "gathered":
            gathered += outputs * forwards
        if cut == "row":
            summed += outputs * forwards
        if cut == "vocabulary":
            summed += inputs
    tokens = (
        layout.grad_accumulation_steps(train)
        * train.micro_batch
        * train.seq_len
        * WIDTH_BYTES[config.precision.compute]
    )
    return {"all_reduce": 2 * once * tokens * summed, "all_gather": once * tokens * gathered}


def pipeline_bytes(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """Hidden states to the next stage in forward, their gradient to the one before in backward, each micro-batch.

    Tensor-parallel ranks all send what they all have; with sequence parallelism each its part.
    """
    neighbours = (not stage.holds_head) + (not stage.holds_embedding)
    own = layout.tp if layout.sequence_parallel else 1
    return neighbours * layout.grad_accumulation_steps(config.train) * hidden_bytes(config, layout) / own
