"""The bytes that a rank sends along the axis of tensor parallelism: activations, and gradients of whole parameters."""

import math

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.cost_model.float8 import amax_bytes
from harness.cost_model.flops import recomputed_layers
from harness.cost_model.micro_batch_shape import MicroBatchShape
from harness.cost_model.ring import SCALARS, ring_fraction
from harness.layout.layer_spec import WHOLE_KEYS, WHOLE_PARAMETERS, layer_branches, layer_matrices, norm_shapes, numel
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage

LOSS_SUMS = 3  # all-reduces of one fp32 number per token in a vocabulary-parallel loss: maximum, sum, target's logit


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


def undivided_numel(model: ModelConfig) -> int:
    """Return the elements of a layer's adapters that each tensor-parallel rank has whole: one matrix of each."""
    matrices = layer_matrices(model)
    return sum(each.rank * (each.inputs if each.style == "column" else each.outputs) for each in matrices)
