"""The bytes of a rank at the worst moments of one backward of a step. Imports no torch."""

from collections.abc import Iterator, Sequence

from harness.cost_model.activations import (
    block_backward_bytes,
    deferred_weight_grad_inputs,
    loss_tensors,
    norm_backward_bytes,
    norm_gradient_bytes,
    recompute_allreduce_bytes,
)
from harness.cost_model.attention_activations import eager_score_tensors
from harness.cost_model.micro_batch_shape import FP32_BYTES
from harness.cost_model.pipeline import BackwardStart, PassKind
from harness.cost_model.stage_activations import LayerActivations
from harness.cost_model.stage_memory import Bytes, StageCost


def backward_peaks(
    cost: StageCost, kind: PassKind, new_gradients: int, reduces_copies: bool = False
) -> Iterator[Bytes]:
    """Yield the bytes of a pass at the worst moments of its backward, in their order.

    `new_gradients` is the bytes of the gradients that this pass allocates; 0 if it adds to those of an earlier pass.
    `reduces_copies` is whether DDP reduces them in this pass, in fp32 copies of its 16-bit buckets.
    """
    shape, activations, holds_head = cost.shape, cost.activations, cost.stage.holds_head
    buffers = cost.transient
    layer_deferred = sum(deferred_weight_grad_inputs(shape).values())
    if kind == "weights":
        at_layer, at_matrix = cost.weight_pass_activations
        left = cost.deferred_grad_bytes - (cost.stage.layers - 1) * layer_deferred
        grads_at_layer, grads_at_matrix = cost.weight_pass_grad_bytes
        yield {"activations": at_layer, "temporaries": left + grads_at_layer, "buffers": buffers.loss}
        at_end = cost.logits_grad_bytes + grads_at_matrix
        yield {"activations": at_matrix, "temporaries": at_end, "buffers": buffers.loss}
        return
    chunked = shape.loss_chunks > 1
    shared_grads = cost.vocabulary_grad_bytes + shape.hidden_bytes if chunked else 0  # of what the loss's parts share
    yield {"activations": activations.before_backward, "buffers": buffers.forward}
    if holds_head:
        loss = sum(loss_tensors(shape).values())
        at_loss = {"activations": activations.before_backward, "loss": loss, "temporaries": shared_grads}
        yield at_loss | {"buffers": buffers.loss}
    if holds_head and kind == "backward":
        # The gradients of the loss's parts are summed out of place: the sum so far, the summand, and their sum.
        computed = (1 + chunked) * cost.vocabulary_grad_bytes + cost.logits_grad_bytes
        matrix = max(computed, (1 + 2 * chunked) * cost.vocabulary_grad_bytes, cost.grad_accumulate_bytes)
        at_head = {"activations": activations.before_backward, "temporaries": shape.hidden_bytes + matrix}
        yield at_head | {"buffers": buffers.head}
        at_reduction = {"activations": activations.in_final_norm, "temporaries": shape.hidden_bytes}
        at_once = new_gradients * cost.allocates_gradients_at_once
        yield at_reduction | {"buffers": buffers.head_reduction, "gradients": at_once}
    if holds_head:
        at_norm = {"activations": activations.in_final_norm, "temporaries": norm_backward_bytes(shape)}
        yield at_norm | {"buffers": buffers.in_layer(0)}
    for index, layer in enumerate(activations.layers):
        for peak in layer_peaks(cost, layer, new_gradients):
            yield peak | {"buffers": peak.get("buffers", 0) + buffers.in_layer(index)}
        if buffers.reductions:
            yield {"activations": layer.in_projections, "buffers": buffers.reductions[index]}
        if kind == "inputs":  # it frees nothing, and what it leaves is yielded below
            break
    if kind == "inputs":
        all_saved = {"activations": activations.before_backward, "loss": cost.log_probability_bytes}
        all_saved["buffers"] = buffers.in_layer(0)
        deferred = cost.deferred_grad_bytes
        block = layer_backward_bytes(cost)
        yield all_saved | {"temporaries": deferred - layer_deferred + block + activations.recomputed}
        yield all_saved | {"temporaries": deferred + norm_backward_bytes(shape) - norm_gradient_bytes(shape)}
        return
    widened = cost.has_16_bit_grads * cost.vocabulary_grad_bytes  # the first gradient becomes the sum
    embedding_grad = widened if new_gradients else cost.grad_accumulate_bytes
    rest = max(0, cost.stage.holds_embedding * embedding_grad - buffers.end)
    if reduces_copies and not new_gradients:  # the copies are made while the sums so far exist
        copied = cost.stage.holds_embedding * cost.vocabulary_grad_bytes + FP32_BYTES * cost.reduced_last_elements
        rest = max(rest, round(copied))
    yield {"gradients": new_gradients, "temporaries": rest, "buffers": buffers.end}


def layer_peaks(cost: StageCost, layer: LayerActivations, new_gradients: int) -> Iterator[Bytes]:
    """Yield the bytes of a pass at the worst moments of the backward of one layer, without what it gathers.

    They are its second norm's, its MLP's, when the gradient of its last matrix exists, its attention's, and that of the
    projections behind its first norm: their gradients of its output are summed out of place, beside the residual
    stream's.
    """
    shape, matrix = cost.shape, cost.mlp_matrix_elements
    computed = new_gradients * cost.computed_share(layer.following)

    def gradients(own_elements: float) -> Bytes:
        if cost.reduces_groups:  # those of a group are whole and in the width of compute until then
            return {"gradients": round(computed), "buffers": round(own_elements * shape.width)}
        if cost.allocates_gradients_at_once:
            return {"gradients": new_gradients}
        return {"gradients": round(computed + new_gradients * own_elements / cost.groups.total)}

    mlp = matrix * (1 + len(shape.model.architecture.widening))
    yield gradients(mlp) | {"activations": layer.in_norm, "temporaries": norm_backward_bytes(shape)}
    yield gradients(matrix) | {"activations": layer.in_block, "temporaries": layer_backward_bytes(cost)}
    scores = sum(eager_score_tensors(shape).values())
    yield gradients(mlp if layer.recomputes_attention else 0) | {"activations": layer.at_scores, "temporaries": scores}
    summed = shape.hidden_bytes + 3 * shape.tokens * shape.model.hidden_size * shape.width
    if new_gradients and not cost.reduces_groups:
        summed -= cost.query_grad_widening_bytes
    yield gradients(cost.groups.layer) | {"activations": layer.in_projections, "temporaries": summed}


def layer_backward_bytes(cost: StageCost) -> int:
    """Return the bytes of intermediates' gradients at the worst moment of a layer's backward."""
    shape, is_recomputed = cost.shape, cost.activations.recomputed > 0
    return max(block_backward_bytes(shape), recompute_allreduce_bytes(shape) if is_recomputed else 0)


def step_peaks(
    costs: Sequence[StageCost],
    gradients: Sequence[int],
    sums: Sequence[int],
    keeps_gradients: bool,
    start: BackwardStart,
    keeps_sent: bool,
) -> Iterator[Bytes]:
    """Yield the rank's bytes at the worst moments of one backward of a step: of that pass and of all that is kept.

    `gradients` is the most bytes of each stage's gradients, `sums` is those that are kept from one micro-batch to the
    next, and `keeps_gradients` is whether they exist when a step begins.
    `keeps_sent` is whether tensors that were sent are kept until the end of the step.
    """
    totals = dict.fromkeys(("gradients", "buffers", "activations", "loss", "temporaries"), 0)
    has_gradients = [keeps_gradients or done > 0 for done in start.done]
    for index, cost in enumerate(costs):
        pending, awaiting = start.pending[index], start.awaiting_weight_grad[index]
        sent, sent_back = start.forwards[index], awaiting + start.done[index]
        if not keeps_sent:
            sent, sent_back = pending, min(1, sent_back)
        if index == start.stage:  # the pass itself is added below
            pending, awaiting = (pending, awaiting - 1) if start.kind == "weights" else (pending - 1, awaiting)
        passes = pending + awaiting
        totals["gradients"] += sums[index] if has_gradients[index] else 0
        totals["activations"] += passes * cost.activations.before_backward
        totals["buffers"] += (
            sent * cost.output_bytes + sent_back * cost.input_bytes - passes * cost.received_input_bytes
        )
        totals["loss"] += pending * cost.log_probability_bytes
        totals["temporaries"] += awaiting * cost.deferred_grad_bytes
    own = costs[start.stage]
    new_gradients = gradients[start.stage] - (sums[start.stage] if has_gradients[start.stage] else 0)
    reduces_copies = own.reduced_last_elements > 0 and start.pending[start.stage] == 1  # in the last pass
    for peak in backward_peaks(own, start.kind, new_gradients, reduces_copies):
        peak["buffers"] = peak.get("buffers", 0) - (own.received_input_bytes if "activations" in peak else 0)
        yield {name: size + peak.get(name, 0) for name, size in totals.items()}
