"""The bytes that one rank must send in a step, as the papers count them, under ring algorithms."""

from collections import defaultdict

from harness.config.schema import RunConfig
from harness.cost_model.flops import must_recompute_last_projection, recomputed_layers
from harness.layout.decoder_profile import norm_shapes
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, local_numel, stages_of_rank
from harness.layout.shapes import numel
from harness.layout.state_widths import StateWidths

# A collective of at most this many elements carries norms, flags or counts, which no formula has: its purpose in the
# record is the name of the function that called it.
SCALARS = 8

LAYOUT = "layout"  # the purpose of all other collectives, which move the tensors of the layout

LOSS_SUMS = 3  # all-reduces of one fp32 number per token in a vocabulary-parallel loss: maximum, sum, target's logit


def ring_fraction(ranks: int) -> float:
    """Return the share that a rank sends of all bytes that are gathered or scattered among so many ranks."""
    return (ranks - 1) / ranks


def expected_bytes(config: RunConfig, layout: Layout, widths: StateWidths, rank: int) -> dict[str, float]:
    """Return the bytes that this rank must send in a step.

    The keys are the axes' names for data-parallel groups (`dp_shard`), and axis and operation for the others
    (`tp all_reduce`). Gradient norms, flags and padding are left out.
    """
    expected: defaultdict[str, float] = defaultdict(float)
    for stage in stages_of_rank(config.model, layout, rank):
        for axes, sent in dp_bytes(config, layout, widths, stage).items():
            expected[axes] += sent
        for operation, sent in tp_bytes(config, layout, stage, widths.tp_allreduces_per_layer).items():
            expected[f"tp {operation}"] += sent
        expected["cp"] += cp_bytes(config, layout, stage)
        expected["pp send"] += pipeline_bytes(config, layout, stage)
    return dict(expected)


def dp_bytes(config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage) -> dict[str, float]:
    """Return the bytes that a rank sends along the data-parallel axes for a stage, by the names of the axes.

    The volume is ZeRO's (arXiv 1910.02054, section 7), with hybrid sharding from its operators (arXiv 2304.11277).
    Stages 0 and 1 synchronize once a step, stages 2 and 3 reduce-scatter every micro-batch; replicas of shards
    synchronize once.
    """
    parameters = sum(local_numel(config.model, layout, stage).values())
    micro_batches = layout.grad_accumulation_steps(config.train)
    reduced_bytes = parameters * config.precision.reduce_bytes
    gathered_bytes = parameters * widths.gathered
    reductions, gathers = {
        0: (0, 0),
        1: (1, 1),
        2: (micro_batches, 1),
        3: (micro_batches, widths.gathers_per_micro_batch * micro_batches),
    }[layout.zero_stage]
    shards, replicas = layout.axes_size(layout.sharding_axes), layout.axes_size(layout.replica_axes)
    along_shards = ring_fraction(shards) * (reductions * reduced_bytes + gathers * gathered_bytes)
    along_replicas = 2 * ring_fraction(replicas) * reduced_bytes / shards
    groups = {
        layout.group_name(*layout.sharding_axes): along_shards,
        layout.group_name(*layout.replica_axes): along_replicas,
    }
    return {axes: sent for axes, sent in groups.items() if axes}


def hidden_bytes(config: RunConfig, layout: Layout) -> int:
    """Return the bytes of a micro-batch's hidden states for all tokens of a rank's part of the sequences."""
    train = config.train
    width = config.precision.compute_bytes
    return train.micro_batch * train.seq_len // layout.cp * config.model.hidden_size * width


def tp_bytes(config: RunConfig, layout: Layout, stage: Stage, allreduces_per_layer: int = 4) -> dict[str, float]:
    """Return the bytes that a rank sends along the tensor-parallel axis for a stage, by operation.

    Megatron-LM (arXiv 1909.08053, section 3) has two all-reduces of the hidden states per layer in forward and two in
    backward, one for the embedding in forward and one for the head in backward. A recomputed layer, selectively too,
    runs its first all-reduce again; torch stops the second forward before the last one, whose result nothing in
    backward needs unless dropout follows it. Sequence parallelism (arXiv 2205.05198) replaces each all-reduce by a
    reduce-scatter and an all-gather; a second forward again gathers both inputs and scatters its sums. The gradients
    of norms and of learned positions are summed once a step, but by fully_shard in every micro-batch, in the width in
    which it has them. A bias is added before its product is summed, a share of it on every rank, and so has a whole
    gradient there. Without vocabulary_parallel embedding, head and loss sum nothing.
    """
    if not layout.tp_enabled:
        return {}
    if model_profile(config.model).communicates_per_matrix:
        return per_matrix_tp_bytes(config, layout)
    train, model = config.train, config.model
    micro_batches = layout.grad_accumulation_steps(train)
    vocabulary_is_cut = layout.vocabulary_parallel
    sums = allreduces_per_layer * stage.layers + vocabulary_is_cut * (stage.holds_embedding + stage.holds_head)
    recomputed = recomputed_layers(config, layout, stage) if config.checkpointing.name != "attention" else 0
    recomputed_sums = recomputed * (2 if must_recompute_last_projection(config) else 1)  # of two per layer
    hidden = micro_batches * hidden_bytes(config, layout)
    tokens = train.micro_batch * train.seq_len // layout.cp
    loss_bytes = LOSS_SUMS * micro_batches * tokens * 4 if vocabulary_is_cut and stage.holds_head else 0
    if train.loss_chunks > 1:  # each part runs a second time, and may be so small that its sums count as scalars
        loss_bytes *= 2 * (tokens // train.loss_chunks > SCALARS)
    ring = ring_fraction(layout.tp)  # an all-reduce sends twice this share
    if not layout.sequence_parallel:
        return {"all_reduce": 2 * ring * ((sums + recomputed_sums) * hidden + loss_bytes)}
    gradients = (2 * stage.layers + stage.holds_head) * numel(norm_shapes("norm", model))
    if stage.holds_embedding and model.architecture.learned_positions:
        gradients += model.context_length * model.hidden_size
    if layout.data_parallel == "fsdp":
        gradient_bytes = gradients * (micro_batches * config.precision.compute_bytes)
    else:
        gradient_bytes = gradients * config.precision.reduce_bytes
    return {
        "all_reduce": 2 * ring * (loss_bytes + gradient_bytes),
        "all_gather": ring * (sums + 2 * recomputed) * hidden,
        "reduce_scatter": ring * (sums + recomputed_sums) * hidden,
    }


def cp_bytes(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """Return the bytes that a rank sends along the context-parallel axis for a stage: keys, values, their gradients.

    There is an all-gather in forward, another in a second forward of layer or attention, and a reduce-scatter in
    backward (Llama 3, arXiv 2407.21783, section 3.3.2).
    """
    if not layout.cp_enabled:
        return 0.0
    train, model = config.train, config.model
    keys_and_values = 2 * model.num_key_value_heads * model.head_dim // layout.tp  # elements per token
    tokens = layout.grad_accumulation_steps(train) * train.micro_batch * train.seq_len
    passes = 2 * stage.layers + recomputed_layers(config, layout, stage)
    return ring_fraction(layout.cp) * passes * tokens * keys_and_values * config.precision.compute_bytes


def per_matrix_tp_bytes(config: RunConfig, layout: Layout) -> dict[str, float]:
    """Return the bytes that a rank sends along the tensor-parallel axis where every matrix communicates by itself.

    A column-parallel matrix sums its input's gradient, a row-parallel one its output. A vocabulary-parallel embedding
    sums its output; a gathered output is gathered in forward. A layer's second forward, where it has one, sums and
    gathers again for all modules that it runs to their end.
    """
    train, ring, profile = config.train, ring_fraction(layout.tp), model_profile(config.model)
    summed = gathered = 0.0  # features per token
    for name, shape in profile.parameter_shapes.items():
        module, _, leaf = name.rpartition(".")
        style, layer = profile.tp_style(module), profile.layer_index(name)
        if leaf != "weight" or style is None:
            continue
        outputs, inputs = shape
        is_recomputed = layer is not None and config.checkpointing.recomputes_layer(layer)
        forwards = 2 if is_recomputed and profile.recomputes_to_end(module) else 1
        if style in ("column", "gathered", "vocabulary"):
            summed += inputs
        if style == "gathered":
            gathered += outputs * forwards
        if style == "row":
            summed += outputs * forwards
    tokens = layout.grad_accumulation_steps(train) * train.micro_batch * train.seq_len
    bytes_per_feature = tokens * config.precision.compute_bytes
    return {"all_reduce": 2 * ring * bytes_per_feature * summed, "all_gather": ring * bytes_per_feature * gathered}


def pipeline_bytes(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """Return the bytes that a rank sends to its stage's neighbors.

    Every micro-batch's hidden states go to the next stage in forward, and their gradient to the one before in backward.
    Tensor-parallel ranks all send all of them; with sequence parallelism each sends its part.
    """
    neighbors = (not stage.holds_head) + (not stage.holds_embedding)
    parts = layout.tp if layout.sequence_parallel else 1
    return neighbors * layout.grad_accumulation_steps(config.train) * hidden_bytes(config, layout) / parts
