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
from harness.cost_model.attention_activations import eager_score_tensors, forward_copies_bytes
from harness.cost_model.layer_backward import Moment, input_grad_reduction_bytes, whole_hidden_bytes
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
    yield {"activations": activations.before_backward, "buffers": buffers.forward}
    scores = sum(eager_score_tensors(shape).values()) + forward_copies_bytes(shape)
    yield {"activations": activations.layers[0].at_scores, "temporaries": scores, "buffers": buffers.forward}
    if holds_head:
        yield from head_peaks(cost, kind, new_gradients)
    if kind == "inputs":  # it frees nothing
        all_saved = {"activations": activations.before_backward, "loss": cost.log_probability_bytes}
        all_saved["buffers"] = buffers.in_layer(0)
        deferred = cost.deferred_grad_bytes
        block = layer_backward_bytes(cost)
        yield all_saved | {"temporaries": deferred - layer_deferred + block + activations.recomputed}
        yield all_saved | {"temporaries": deferred + norm_backward_bytes(shape) - norm_gradient_bytes(shape)}
        return
    for index, layer in enumerate(activations.layers):
        peak = layer_peak(cost, layer, new_gradients)
        yield peak | {"buffers": peak.get("buffers", 0) + buffers.in_layer(index)}
        if buffers.reductions:
            saved = layer.outside + layer.moments[-1].saved
            yield {"activations": saved, "temporaries": shape.hidden_bytes, "buffers": buffers.reductions[index]}
    for end in end_peaks(cost, new_gradients, reduces_copies):
        yield end | {"buffers": buffers.end, "temporaries": max(0, end["temporaries"] - buffers.end)}


def head_peaks(cost: StageCost, kind: PassKind, new_gradients: int) -> Iterator[Bytes]:
    """Yield the bytes at the worst moments of the backward of loss, head and final norm.

    Backward of the last part of the loss has the gradients of the hidden states of all parts before it.
    """
    shape, activations, buffers = cost.shape, cost.activations, cost.transient
    chunks, matrix, hidden_grad = shape.loss_chunks, cost.vocabulary_grad_bytes, whole_hidden_bytes(shape)
    earlier_hidden_grads = hidden_grad * (chunks - 1) // chunks
    shared_grads = matrix + earlier_hidden_grads if chunks > 1 else 0  # of what the parts share
    before = {"activations": activations.before_backward}
    loss = sum(loss_tensors(shape).values())
    yield before | {"loss": loss, "temporaries": shared_grads, "buffers": buffers.loss}
    computed = round(cost.computed_gradients(new_gradients, 0)) if kind == "backward" else 0
    behind = {"activations": activations.in_final_norm, "gradients": computed}
    if kind == "backward":
        in_product = hidden_grad + (1 + (chunks > 1)) * matrix + cost.logits_grad_bytes
        # The gradients of the parts are summed out of place: the sum so far, the summand, and their sum.
        summed = earlier_hidden_grads + 3 * matrix if chunks > 1 else 0
        yield before | {"temporaries": max(in_product, summed), "buffers": buffers.head}
        reduced = {"temporaries": shape.hidden_bytes, "buffers": buffers.head_reduction}
        if cost.reduces_groups:  # the buffers include the gradient
            yield {"activations": activations.in_final_norm} | reduced
        else:
            accumulated = matrix * cost.has_16_bit_grads if new_gradients else cost.grad_accumulate_bytes
            yield behind | {"temporaries": hidden_grad + accumulated, "buffers": buffers.head}
            yield behind | reduced
    in_norm = max(norm_backward_bytes(shape), input_grad_reduction_bytes(shape)) + cost.waiting_grad_bytes
    yield behind | {"temporaries": in_norm, "buffers": buffers.in_layer(0)}


def end_peaks(cost: StageCost, new_gradients: int, reduces_copies: bool) -> Iterator[Bytes]:
    """Yield the bytes when a pass computes the last gradient, the embedding's, and when that becomes the parameter's.

    A tied matrix has two gradients, whose sum is made beside them. The buffers of a group include its gradient.
    """
    if reduces_copies and not new_gradients:  # the copies are made while the sums so far exist
        copied = FP32_BYTES * cost.reduced_last_elements + cost.vocabulary_grad_bytes * cost.stage.holds_embedding
        yield {"gradients": 0, "temporaries": round(copied)}
    if not cost.stage.holds_embedding or cost.reduces_groups:
        yield {"gradients": new_gradients, "temporaries": 0}
        return
    matrix, is_tied = cost.vocabulary_grad_bytes, cost.shape.model.tie_word_embeddings
    computed = max((1 + is_tied) * matrix + whole_hidden_bytes(cost.shape), 3 * matrix * is_tied)
    if not new_gradients:
        yield {"gradients": 0, "temporaries": max(computed, cost.grad_accumulate_bytes)}
    elif cost.has_16_bit_grads:
        yield {"gradients": new_gradients - matrix * FP32_BYTES // cost.shape.width, "temporaries": computed}
        yield {"gradients": new_gradients, "temporaries": matrix}
    else:  # the gradient becomes the parameter's own
        yield {"gradients": new_gradients, "temporaries": computed - matrix}


def layer_peak(cost: StageCost, layer: LayerActivations, new_gradients: int) -> Bytes:
    """Return the bytes of a pass at the worst moment of the backward of one layer, without what it gathers."""
    before = cost.computed_gradients(new_gradients, layer.following)
    new_bytes_of_element = 0 if cost.allocates_gradients_at_once else new_gradients / cost.groups.total

    def bytes_at(moment: Moment) -> Bytes:
        gradients = layer_gradients(cost, moment, new_bytes_of_element)
        gradients["gradients"] += round(before)
        gradients["temporaries"] += moment.temporaries + cost.waiting_grad_bytes
        return gradients | {"activations": layer.outside + moment.saved}

    return max(map(bytes_at, layer.moments), key=lambda peak: sum(peak.values()))


def layer_gradients(cost: StageCost, moment: Moment, new_bytes_of_element: float) -> Bytes:
    """Return the bytes of the gradients of a layer's weights, of which so many are new for each element.

    A gradient in fp32 becomes the parameter's own. One in 16 bit is added to it, or widened to become it. Where
    gradients are reduced group by group, those of a group are whole and in the width of compute until then.
    """
    computed = moment.computed * cost.shape.width
    if cost.reduces_groups:
        return {"gradients": 0, "temporaries": 0, "buffers": moment.weights * cost.shape.width + computed}
    complete = moment.weights
    if new_bytes_of_element and (moment.is_accumulation or not cost.has_16_bit_grads):
        complete += moment.computed
    if new_bytes_of_element and not cost.has_16_bit_grads:
        computed = 0
    elif moment.is_accumulation and cost.has_16_bit_grads and cost.shape.device == "cpu" and not new_bytes_of_element:
        computed += moment.computed * FP32_BYTES  # a CPU widens it first
    return {"gradients": round(complete * new_bytes_of_element), "temporaries": computed}


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
