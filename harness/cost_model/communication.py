"""The bytes that one rank must send in a step under ring algorithms: as the papers count them, and exactly."""

import math
from collections import defaultdict
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig, RunConfig
from harness.cost_model.expert_communication import RoutedRows, balanced_routing, ep_bytes, ring_fraction
from harness.cost_model.float8 import amax_bytes
from harness.cost_model.flops import recomputed_layers
from harness.cost_model.micro_batch_shape import MicroBatchShape, micro_batch_shape
from harness.cost_model.optimizer_state import BF16_BYTES, gathered_updates
from harness.layout.layer_spec import WHOLE_KEYS, WHOLE_PARAMETERS, layer_branches, norm_shapes, numel, undivided_numel
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, fsdp_rows, is_expert_weight, local_numel, local_shapes, stages_of_rank
from harness.layout.state_widths import StateWidths

# A collective of at most this many elements carries norms, flags or counts, which no formula has, unless it exchanges
# tokens: its purpose in the record is the name of the function that called it.
SCALARS = 8

LAYOUT = "layout"  # the purpose of all other collectives, which move the tensors of the layout

# Functions that move the layout's tensors however small: DeepSpeed's stages 1 and 2 cut gradients where partitions end.
LAYOUT_CALLERS = frozenset({"DeepSpeedZeroOptimizer.allreduce_bucket"})

LOSS_SUMS = 3  # all-reduces of one fp32 number per token in a vocabulary-parallel loss: maximum, sum, target's logit

FLAT_ALIGNMENT = 2  # elements a rank, to which DeepSpeed's stages 1 and 2 pad a group (nccl_start_alignment_factor)


def expected_bytes(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    rank: int,
    *,
    is_padded: bool = False,
    is_sent: bool = False,
    routed: RoutedRows | None = None,
) -> dict[str, float]:
    """Return the bytes that this rank must send in a step by the papers, in which every share is even.

    The keys are an axis, or several joined by '+', and a kind: gather or reduce along the axes of data and sequences
    (`dp_shard gather`), the operation along the others (`tp all_reduce`). Gradient norms and flags are left out. With
    `is_padded` shares are uneven, and padded as the library does it. With `is_sent` gradients count twice where a
    library all-reduces what the papers reduce once. `routed` returns how many rows of tokens the rank sends to others'
    experts, and receives for its own, in the layer of an index in all micro-batches; by default they are
    balanced_rows().
    """
    expected: defaultdict[str, float] = defaultdict(float)
    shape = micro_batch_shape(config, layout, "cpu")  # what is sent is the same on every device
    routed = routed or balanced_routing(config, layout, rank, shape)
    passes = 1 + (is_sent and widths.all_reduces_gradients)
    for stage in stages_of_rank(config.model, layout, rank):
        # Every micro-batch's hidden states go to the next stage in forward, and their gradient to the one before in
        # backward. Tensor-parallel ranks all send all of them; with sequence parallelism each sends its part.
        neighbors = (not stage.holds_head) + (not stage.holds_embedding) - abs(stage.local_neighbor)
        transfers = neighbors * layout.grad_accumulation_steps(config.train) * shape.hidden_bytes
        for sent in (
            *(
                dp_bytes(config, layout, widths, stage, rank if is_padded else None, passes, of_experts)
                for of_experts in ((False, True) if layout.ep_enabled else (None,))
            ),
            ep_bytes(config, layout, stage, shape, routed),
            tp_bytes(config, layout, stage, shape, widths.tp_allreduces_per_layer),
            cp_bytes(config, layout, stage, shape),
            {"pp send": transfers + tied_bytes(config, layout, stage, rank if is_padded else None)},
        ):
            for name, size in sent.items():
                expected[name] += size  # shards of fully_shard may lie along cp, too
    return dict(expected)


def tied_bytes(config: RunConfig, layout: Layout, stage: Stage, rank: int | None) -> float:
    """Return the bytes of its shard of a tied table's gradient that an end of a pipeline sends to the other end.

    Shards are equal runs of rows, the last ones shorter; without a rank they are an even share.
    """
    if not config.model.tie_word_embeddings or stage.holds_embedding == stage.holds_head:
        return 0.0
    table, shards = "embed_tokens.weight", layout.shard_count("gradients")
    if rank is None:
        return local_numel(config.model, layout, stage)[table] / shards * config.precision.accumulate_bytes
    rows, width = local_shapes(config.model, layout, stage, rank)[table]
    part, index = math.ceil(rows / shards), layout.shard_index(rank) if shards > 1 else 0
    return float(min(part, max(0, rows - index * part)) * width * config.precision.accumulate_bytes)


def tp_bytes(
    config: RunConfig, layout: Layout, stage: Stage, shape: MicroBatchShape, allreduces_per_layer: int
) -> dict[str, float]:
    """Return the bytes that a rank sends along the tensor-parallel axis for a stage, by operation.

    Megatron-LM (arXiv 1909.08053, section 3) has two all-reduces of the hidden states per layer in forward and two in
    backward, one for the embedding in forward and one for the head in backward. A recomputed layer, selectively too,
    runs its first all-reduce again; torch stops the second forward before the last one, whose result nothing in
    backward needs unless dropout follows it. Sequence parallelism (arXiv 2205.05198) replaces each all-reduce by a
    reduce-scatter and an all-gather; a second forward again gathers both inputs and scatters its sums. The gradients
    of norms and of learned positions then, and those of routers and of an adapter's whole matrix always, are summed
    once a step, but by fully_shard in every micro-batch, in the width in which it has them; frozen norms have none. A
    bias is added before its product is summed, a share of it on every rank, and so has a whole gradient there. Without
    vocabulary_parallel embedding, head and loss sum nothing.
    """
    if not layout.tp_enabled:
        return {}
    train, model = config.train, config.model
    micro_batches = layout.grad_accumulation_steps(train)
    in_every_micro_batch = micro_batches * config.precision.compute_bytes
    width = in_every_micro_batch if layout.data_parallel == "fsdp" else config.precision.reduce_bytes
    if not model_profile(model).is_project_decoder:
        return per_matrix_tp_bytes(config, layout, shape, width)
    vocabulary_is_cut = layout.vocabulary_parallel
    sums = allreduces_per_layer * stage.layers + vocabulary_is_cut * (stage.holds_embedding + stage.holds_head)
    recomputed = recomputed_layers(config, layout, stage) if config.checkpointing.name != "attention" else 0
    branches = len(layer_branches(model))  # of a layer, each with a sum
    recomputed_sums = recomputed * (branches - (model.dropout == 0 and not train.compile))
    hidden, tokens = micro_batches * shape.whole_hidden_bytes, shape.tokens
    has_loss = vocabulary_is_cut and stage.holds_head and tokens // train.loss_chunks > SCALARS
    # Each part of a loss in parts runs a second time.
    loss_bytes = has_loss * (1 + (train.loss_chunks > 1)) * LOSS_SUMS * micro_batches * tokens * 4
    ring = ring_fraction(layout.tp)  # an all-reduce sends twice this share
    gradients = stage.layers * (model.num_experts * model.hidden_size + undivided_numel(model))
    amax = micro_batches * amax_bytes(shape, stage.layers, float(recomputed))
    if not layout.sequence_parallel:
        return {"tp all_reduce": 2 * ring * ((sums + recomputed_sums) * hidden + loss_bytes + amax + gradients * width)}
    trains_all = not model.adapter.is_enabled
    gradients += (branches * stage.layers + stage.holds_head) * numel(norm_shapes("norm", model)) * trains_all
    frozen_table = vocabulary_is_cut and stage.holds_embedding and not trains_all  # whose output's gradient none needs
    if stage.holds_embedding and model.architecture.learned_positions:
        gradients += model.context_length * model.hidden_size
    return {
        "tp all_reduce": 2 * ring * (loss_bytes + amax + gradients * width),
        "tp all_gather": ring * (sums + branches * recomputed - frozen_table) * hidden,
        "tp reduce_scatter": ring * (sums + recomputed_sums) * hidden,
    }


def cp_bytes(config: RunConfig, layout: Layout, stage: Stage, shape: MicroBatchShape) -> dict[str, float]:
    """Return the bytes that a rank sends along the context-parallel axis for a stage: keys, values, their gradients.

    There is an all-gather in forward, another in a second forward of layer or attention, and a reduce-scatter in
    backward (Llama 3, arXiv 2407.21783, section 3.3.2). Ranks that exchange heads send queries and outputs as well
    (Ulysses, arXiv 2309.14509, section 3.2); a second forward of attention alone stops before its output is sent.
    """
    if not layout.cp_enabled:
        return {}
    sent, recomputed = 2 * shape.core_key_bytes, recomputed_layers(config, layout, stage)
    one_pass = ring_fraction(layout.cp) * layout.grad_accumulation_steps(config.train)
    if layout.exchanges_heads:
        outputs = 2 * stage.layers + recomputed * (config.checkpointing.name != "attention")
        queries_and_keys = (2 * stage.layers + recomputed) * (shape.query_bytes + sent)
        return {"cp all_to_all": one_pass * (queries_and_keys + outputs * shape.query_bytes)}
    return {"cp gather": one_pass * (stage.layers + recomputed) * sent, "cp reduce": one_pass * stage.layers * sent}


def per_matrix_tp_bytes(config: RunConfig, layout: Layout, shape: MicroBatchShape, width: float) -> dict[str, float]:
    """Return the bytes that a rank sends along the tensor-parallel axis where every matrix communicates by itself.

    A column-parallel matrix sums its input's gradient, a row-parallel one its output. A vocabulary-parallel embedding
    sums its output; a gathered output is gathered in forward, and the gradient of a split input in backward. A layer's
    second forward, where it has one, sums and gathers again for all modules that it runs to their end. Gradients of
    parameters that every rank has whole are summed in `width` bytes a step, those of rotated keys like activations.
    """
    ring, profile, model = ring_fraction(layout.tp), model_profile(config.model), config.model
    shapes, gradients, summed, gathered = profile.parameter_shapes, 0, 0.0, 0.0  # elements, and features per token
    for module, style in profile.tensor_plan.items():
        if style == WHOLE_PARAMETERS:
            gradients += sum(math.prod(shapes.get(f"{module}.{leaf}", (0,))) for leaf in ("weight", "bias"))
        elif style == WHOLE_KEYS:
            summed += profile.rotated_key_features
        else:  # a tied head has no weight of its own
            outputs, inputs = shapes.get(f"{module}.weight", (model.vocab_size, model.hidden_size))
            layer, splits_input = profile.layer_index(module), style == "rowwise_split_input"
            is_recomputed = layer is not None and config.checkpointing.recomputes_layer(layer)
            forwards = 2 if is_recomputed and profile.recomputes_to_end(module) else 1
            summed += outputs * forwards if style == "row" or splits_input else inputs
            gathered += outputs * forwards * (style == "gathered") + inputs * splits_input
    sent = ring * layout.grad_accumulation_steps(config.train) * shape.sequences * shape.seq_len * shape.width
    return {"tp all_reduce": 2 * (sent * summed + ring * gradients * width), "tp all_gather": sent * gathered}


def sent_elements(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    rank: int | None = None,
    of_experts: bool | None = None,
) -> tuple[float, float]:
    """Return the elements of a stage's whole parameters that are gathered and reduced in a step, each time counted.

    They are the papers', in which every rank has an even share, or a rank's, which moves its own part of every
    parameter, and the padding of the shards. They are those of experts, of all other parameters, or of both.
    """
    narrow = 1 / config.precision.compute_bytes if config.precision.float8_all_gather else 1.0
    key = (config.model, config.checkpointing, layout, widths, stage, rank, of_experts, narrow)
    gathered, reduced = _sent_elements_once(*key)
    gatherings = layout.grad_accumulation_steps(config.train) if layout.zero_stage == 3 else 1
    return gatherings * gathered, reductions_per_step(config, layout) * reduced


@lru_cache(maxsize=1024)
def _sent_elements_once(
    model: ModelConfig,
    checkpointing: CheckpointingConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    rank: int | None,
    of_experts: bool | None,
    narrow: float,
) -> tuple[float, float]:
    """Return the elements of one gathering and one reduction; a gathered matrix of a layer counts as `narrow` of its.

    `widths.padding` says what is padded to a multiple of the shards' number. rows: the first dimension of every
    parameter (fully_shard: torch.distributed.fsdp._fully_shard._fsdp_collectives). elements: every flat parameter
    (DeepSpeed's stage 3: partition_parameters.py, reduce_scatter_coalesced). partition: the flat buffer of all
    trained parameters that stages 1 and 2 gather, and no gradient (stage_1_and_2.py, flatten_dense_tensors_aligned).
    """
    own, padding = layout.of_experts if of_experts else layout, "none" if rank is None else widths.padding
    shards = own.axes_size(own.sharding_axes)
    sizes: dict[str, float] = dict(local_numel(model, layout, stage))
    if rank is not None:
        shapes, multiple = local_shapes(model, layout, stage, rank), shards if padding == "rows" else 1
        sizes = {}
        for name, shape in shapes.items():
            rows, row = fsdp_rows(shape, multiple)
            sizes[name] = _round_up(rows, multiple) * row
    if of_experts is not None:
        sizes = {name: size for name, size in sizes.items() if is_expert_weight(name) == of_experts}
    if padding == "elements":
        sizes = {name: _round_up(size, shards) for name, size in sizes.items()}
    trained = [size for name, size in sizes.items() if model.adapter.trains(name)]
    matrices = {f"{each.path}.weight" for each in model_profile(model).layer_matrices}
    shares = {name: narrow if name.split(".", 2)[-1] in matrices else 1.0 for name in sizes}
    gathered = sum(gathers(model, checkpointing, layout, widths, name) * shares[name] * sizes[name] for name in sizes)
    if padding == "partition":
        *others, last = trained
        aligned = sum(_round_up(size, widths.parameter_alignment) for size in others)
        gathered = _round_up(aligned + last, FLAT_ALIGNMENT * shards)
    return gathered, sum(trained)


def dp_bytes(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    stage: Stage,
    rank: int | None,
    passes: int,
    of_experts: bool | None,
) -> dict[str, float]:
    """Return the bytes that a rank sends along the data-parallel axes, by the names of axes and by gather or reduce.

    The volume is ZeRO's (arXiv 1910.02054, section 7), with hybrid sharding from its operators (arXiv 2304.11277).
    Stages 0 and 1 synchronize once a step, stages 2 and 3 reduce-scatter every micro-batch; replicas of shards
    synchronize once. A reduction goes through the ring so many times. Experts that expert parallelism divides are
    gathered and reduced among the ranks that have the same ones.
    """
    gathered, reduced = sent_elements(config, layout, widths, stage, rank, of_experts)
    updates = sum(gathered_updates(config, layout, stage, is_padded=rank is not None))
    own = layout.of_experts if of_experts else layout
    shards, replicas = own.axes_size(own.sharding_axes), own.axes_size(own.replica_axes)
    along_shards, along_replicas = own.group_name(*own.sharding_axes), own.group_name(*own.replica_axes)
    reduce_bytes, reduced_once = config.precision.reduce_bytes, reduced / reductions_per_step(config, layout)
    among_few = gathered_among_few(config, layout, widths, stage, rank) if layout.secondary_shards > 1 else 0.0
    among_all = ring_fraction(shards) * ((gathered - among_few) * widths.gathered + updates * BF16_BYTES)
    sent = {
        (along_shards, "gather"): among_all + ring_fraction(layout.secondary_shards) * among_few * widths.gathered,
        (along_shards, "reduce"): passes * ring_fraction(shards) * reduced * reduce_bytes * (layout.zero_stage > 0),
        (along_replicas, "reduce"): 2 * ring_fraction(replicas) * reduced_once * reduce_bytes / shards,
    }
    return {f"{axes} {kind}": volume for (axes, kind), volume in sent.items() if axes}


def gathered_among_few(config: RunConfig, layout: Layout, widths: StateWidths, stage: Stage, rank: int | None) -> float:
    """Return the elements of secondary shards that a step gathers (ZeRO++, arXiv 2306.10209, section 3.2).

    They serve all gatherings but the first one of a micro-batch, or where they last until the update, of a step.
    """
    gathered, reduced = sent_elements(config, layout, widths, stage, rank)
    return gathered - reduced / (reductions_per_step(config, layout) if widths.keeps_secondary_shards else 1)


def reductions_per_step(config: RunConfig, layout: Layout) -> int:
    """Return how often a step reduces each gradient: once, or in stages 2 and 3 in every micro-batch."""
    return layout.grad_accumulation_steps(config.train) if layout.zero_stage >= 2 else 1


def gathers(
    model: ModelConfig, checkpointing: CheckpointingConfig, layout: Layout, widths: StateWidths, name: str
) -> int:
    """Return how often this parameter is gathered in a step, or in stage 3 in a micro-batch, if none is cached.

    Stages 1 and 2 gather it once if it is trained, or if fully_shard divides it. Stage 3 gathers it twice. Where each
    use gathers, a parameter of a recomputed layer, even of a selectively recomputed one, is gathered a third time; the
    layer's last projection is an exception, before which the recomputation stops unless dropout follows it. A tied
    embedding has two uses, a frozen one no backward of its own.
    """
    if layout.zero_stage < 3:
        return min(1, layout.zero_stage) * (layout.data_parallel == "fsdp" or model.adapter.trains(name))
    profile = model_profile(model)
    without_backward = model.adapter.is_enabled and name in profile.embedding_shapes
    if not widths.gathers_for_each_use:
        return 2 - (without_backward and not model.tie_word_embeddings)
    layer = profile.layer_index(name)
    is_recomputed = layer is not None and checkpointing.recomputes_layer(layer)
    if is_recomputed and (model.dropout > 0 or profile.recomputes_to_end(name.rpartition(".")[0])):
        return 3
    shapes, matrix = profile.embedding_shapes, (model.vocab_size, model.hidden_size)
    tables = (table for table in shapes if shapes[table] == matrix)
    return (4 if model.tie_word_embeddings and name == next(tables, None) else 2) - without_backward


def _round_up(size: float, multiple: int) -> float:
    return -(-size // multiple) * multiple
