"""The bytes of a rank at the worst moments of one backward of a step. Imports no torch."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from harness.cost_model.activations import loss_bytes
from harness.cost_model.attention_activations import scores_bytes
from harness.cost_model.layer_backward import (
    Moment,
    block_backward_bytes,
    deferred_weight_grad_bytes,
    recompute_allreduce_bytes,
)
from harness.cost_model.micro_batch_shape import FP32_BYTES
from harness.cost_model.pipeline import BackwardStart, PassKind
from harness.cost_model.stage_activations import LayerActivations, StageActivations
from harness.cost_model.stage_memory import Bytes, StageCost
from harness.cost_model.transient_buffers import ONLY_PASS, LayerBuffers, Pass, TransientBuffers


def backward_peaks(
    cost: StageCost, kind: PassKind, new_gradients: int, reduces_copies: bool = False, moment: Pass = ONLY_PASS
) -> Iterator[Bytes]:
    """Yield the bytes of a pass at the worst moments of its backward, in their order.

    `new_gradients` is the bytes of the gradients that this pass allocates; 0 if it adds to those of an earlier pass.
    `reduces_copies` is whether DDP reduces them in this pass, in fp32 copies of its 16-bit buckets.
    """
    shape, activations, holds_head = cost.shape, cost.activations, cost.stage.holds_head
    buffers, layer_deferred = cost.transient(moment), deferred_weight_grad_bytes(shape)
    if kind == "weights":
        at_layer, at_matrix = cost.weight_pass_activations
        left = cost.deferred_grad_bytes - (cost.stage.layers - 1) * layer_deferred
        grads_at_layer, grads_at_matrix = cost.weight_pass_grad_bytes
        yield {"activations": at_layer, "temporaries": left + grads_at_layer, "buffers": buffers.loss}
        at_end = cost.logits_grad_bytes + grads_at_matrix
        yield {"activations": at_matrix, "temporaries": at_end, "buffers": buffers.loss}
        return
    yield {"activations": activations.before_backward, "buffers": buffers.forward}
    yield from forward_peaks(activations, buffers.forward_layers)
    if buffers.last_layer:
        yield {"activations": activations.layers[0].outside, "buffers": buffers.last_layer}
    yield {
        "activations": activations.layers[0].at_scores,
        "temporaries": scores_bytes(shape),
        "buffers": buffers.forward,
    }
    if not holds_head:
        yield {"activations": activations.before_backward, "buffers": buffers.entering}
    if holds_head:
        yield from head_peaks(cost, kind, new_gradients, buffers)
    if kind == "inputs":  # it frees nothing
        all_saved = {"activations": activations.before_backward, "loss": cost.log_probability_bytes}
        all_saved["buffers"] = buffers.in_layer(0)
        deferred = cost.deferred_grad_bytes
        block = block_backward_bytes(shape)
        block = max(block, recompute_allreduce_bytes(shape)) if activations.recomputed else block
        yield all_saved | {"temporaries": deferred - layer_deferred + block + activations.recomputed}
        yield all_saved | {"temporaries": deferred + shape.norm_backward_bytes - shape.norm_gradient_bytes}
        return
    for index, layer in enumerate(activations.layers):
        before = round(cost.computed_gradients(new_gradients, layer.following))
        if buffers.entered:
            saved = layer.outside + layer.own.saved
            entered = {"activations": saved, "gradients": before, "temporaries": shape.hidden_bytes}
            yield entered | {"buffers": buffers.entered[index]}
        if buffers.observed:
            yield observed_peak(cost, layer, buffers.observed[index], new_gradients)
            continue
        peak = layer_peak(cost, layer, new_gradients)
        yield peak | {"buffers": peak.get("buffers", 0) + buffers.in_layer(index)}
        if buffers.reductions:
            saved = layer.outside + layer.own.saved_at_end
            reduced = {"activations": saved, "temporaries": shape.hidden_bytes, "buffers": buffers.reductions[index]}
            yield reduced | {"gradients": before * cost.reduces_groups}
    if cost.reduces_groups:
        if cost.stage.holds_embedding:
            at_embedding = {"temporaries": shape.whole_hidden_bytes, "buffers": buffers.last_gradient}
            yield {"gradients": round(cost.computed_gradients(new_gradients, cost.stage.layers))} | at_embedding
        yield {"gradients": new_gradients, "temporaries": 0, "buffers": buffers.end}
        return
    for following, middle in buffers.middle:
        yield observed_peak(cost, cost.layer_activations(following), middle, new_gradients)
    if buffers.observed:  # the last gradient is among DeepSpeed's buffers
        before = new_gradients * buffers.reduces_before_end
        yield {"gradients": before, "temporaries": shape.whole_hidden_bytes, "buffers": buffers.last_gradient}
        yield {"gradients": before, "temporaries": 0, "buffers": buffers.first_reduction}
        yield {"gradients": new_gradients, "temporaries": 0, "buffers": buffers.end}
        return
    for end in end_peaks(cost, new_gradients, reduces_copies):
        yield end | {"buffers": buffers.end}


def forward_peaks(activations: StageActivations, buffers: Sequence[int]) -> Iterator[Bytes]:
    """Yield the bytes in the forward of the layers that have more buffers than any layer behind them.

    `buffers` is the bytes of each layer; without them there is no such layer. Layers keep equally much for backward.
    """
    last, first, most = activations.layers[0], activations.layers[-1], 0
    of_layer = (last.outside - first.outside) // max(1, first.following)
    for following, size in enumerate(reversed(buffers)):
        if size > most:
            most = size
            yield {"activations": last.outside + last.own.saved - following * of_layer, "buffers": size}


def head_peaks(cost: StageCost, kind: PassKind, new_gradients: int, buffers: TransientBuffers) -> Iterator[Bytes]:
    """Yield the bytes at the worst moments of the backward of loss, head and final norm.

    Backward of the last part of the loss has the gradients of the hidden states of all parts before it.
    """
    shape, activations = cost.shape, cost.activations
    chunks, matrix, hidden_grad = shape.loss_chunks, cost.vocabulary_grad_bytes, shape.whole_hidden_bytes
    earlier_hidden_grads = hidden_grad * (chunks - 1) // chunks
    shared_grads = matrix + earlier_hidden_grads if chunks > 1 else 0  # of what the parts share
    before = {"activations": activations.before_backward}
    yield before | {"loss": loss_bytes(shape), "temporaries": shared_grads, "buffers": buffers.loss}
    computed = round(cost.computed_gradients(new_gradients, 0)) if kind == "backward" else 0
    behind = {"activations": activations.in_final_norm, "gradients": computed}
    if kind == "backward":
        in_product = hidden_grad + (1 + (chunks > 1)) * matrix + cost.logits_grad_bytes
        # The gradients of the parts are summed: the sum so far, the summand, and where it is another tensor their sum.
        summed = earlier_hidden_grads + (3 - cost.sums_in_place) * matrix if chunks > 1 else 0
        yield before | {"temporaries": max(in_product, summed), "buffers": buffers.head}
        yield before | {"temporaries": cost.logits_grad_bytes, "buffers": buffers.entering}
        reduced = {"temporaries": shape.hidden_bytes, "buffers": buffers.head_reduction}
        if cost.reduces_groups:  # the buffers include the gradient
            norm = {"temporaries": shape.norm_backward_bytes + matrix, "buffers": buffers.head}
            yield {"activations": activations.in_final_norm} | norm
            if buffers.head_reduction:
                yield {"activations": activations.before_backward - activations.in_head} | reduced
            return
        accumulated = matrix * cost.has_16_bit_grads if new_gradients else cost.grad_accumulate_bytes
        yield behind | {"temporaries": hidden_grad + accumulated, "buffers": buffers.head}
        yield behind | reduced | ({"gradients": new_gradients - buffers.later} if buffers.reduces_head else {})
    in_norm = max(shape.norm_backward_bytes, shape.input_grad_reduction_bytes) + cost.waiting_grad_bytes
    yield behind | {"temporaries": in_norm, "buffers": buffers.in_layer(0)}


def end_peaks(cost: StageCost, new_gradients: int, reduces_copies: bool) -> Iterator[Bytes]:
    """Yield the bytes when a pass computes the last gradient, the embedding's, and when that becomes the parameter's.

    A tied matrix has two gradients, whose sum is made beside them unless one is added to the other.
    """
    if reduces_copies and not new_gradients:  # the copies are made while the sums so far exist
        copied = FP32_BYTES * cost.reduced_last_elements + cost.vocabulary_grad_bytes * cost.stage.holds_embedding
        yield {"gradients": 0, "temporaries": round(copied)}
    if not cost.stage.holds_embedding:
        yield {"gradients": new_gradients, "temporaries": 0}
        return
    matrix, is_tied = cost.vocabulary_grad_bytes, cost.shape.model.tie_word_embeddings
    summed = (3 - cost.sums_in_place) * matrix * is_tied
    computed = max((1 + is_tied) * matrix + cost.shape.whole_hidden_bytes, summed)
    if not new_gradients:
        yield {"gradients": 0, "temporaries": max(computed, cost.grad_accumulate_bytes)}
    elif cost.has_16_bit_grads:
        yield {"gradients": new_gradients - matrix * FP32_BYTES // cost.shape.width, "temporaries": computed}
        yield {"gradients": new_gradients, "temporaries": matrix}
    else:  # the gradient becomes the parameter's own
        yield {"gradients": new_gradients, "temporaries": computed - matrix}


def layer_peak(cost: StageCost, layer: LayerActivations, new_gradients: int) -> Bytes:
    """Return the bytes of a pass at the worst moment of the backward of one layer, without what it gathers."""
    before = round(cost.computed_gradients(new_gradients, layer.following))
    new_bytes_of_element = 0 if cost.allocates_gradients_late else new_gradients / cost.groups.total
    highest, worst = -1, (0, 0, 0, 0)
    for moment in layer.own.moments:
        gradients, temporaries, buffers = layer_gradients(cost, moment, new_bytes_of_element)
        total = moment.saved + moment.temporaries + gradients + temporaries + buffers
        if total > highest:
            highest, worst = total, (moment.saved, gradients, moment.temporaries + temporaries, buffers)
    saved, gradients, temporaries, buffers = worst
    peak = {"gradients": before + gradients, "temporaries": temporaries + cost.waiting_grad_bytes}
    return peak | {"buffers": buffers, "activations": layer.outside + saved}


def observed_peak(cost: StageCost, layer: LayerActivations, observed: LayerBuffers, new_gradients: int) -> Bytes:
    """Return the bytes at the worst moment of the backward of a layer whose buffers change within it."""
    moments = layer.own.all_moments
    sizes = observed_buffer_bytes(observed, layer.own.weight_moments, new_gradients)
    totals = [moment.saved + moment.temporaries + sum(size) for moment, size in zip(moments, sizes, strict=True)]
    worst = max(range(len(totals)), key=totals.__getitem__)
    temporaries = moments[worst].temporaries + cost.waiting_grad_bytes
    saved, (gradients, buffers) = layer.outside + moments[worst].saved, sizes[worst]
    return {"activations": saved, "gradients": gradients, "temporaries": temporaries, "buffers": buffers}


@lru_cache(maxsize=4096)
def observed_buffer_bytes(
    observed: LayerBuffers, moments: tuple[Moment, ...], new_gradients: int
) -> list[tuple[int, int]]:
    """Return LayerBuffers.buffer_bytes(), which many micro-batches share."""
    return observed.buffer_bytes(moments, new_gradients)


def layer_gradients(cost: StageCost, moment: Moment, new_bytes_of_element: float) -> tuple[int, int, int]:
    """Return the bytes of a layer's weights' gradients: the parameters' own, temporaries, and those in buffers.

    So many bytes of the parameters' own are new for each element. A gradient in fp32 becomes the parameter's own. One
    in 16 bit is added to it, or widened to become it. Where gradients are reduced group by group, those of a group are
    whole and in the width of compute until then.
    """
    width = cost.shape.width
    computed = moment.computed * width
    if cost.reduces_groups:
        return 0, 0, moment.weights * width + computed
    complete = moment.weights
    if new_bytes_of_element and (moment.is_accumulation or not cost.has_16_bit_grads):
        complete += moment.computed
    if new_bytes_of_element and not cost.has_16_bit_grads:
        computed = 0
    elif moment.is_accumulation and cost.has_16_bit_grads and cost.shape.device == "cpu" and not new_bytes_of_element:
        computed += moment.computed * FP32_BYTES  # a CPU widens it first
    return round(complete * new_bytes_of_element), computed, 0


PARTS = ("gradients", "buffers", "activations", "loss", "temporaries")  # of a rank's bytes beside its state


def bytes_between_passes(
    costs: Sequence[StageCost],
    kept_gradients: Sequence[int],
    start: BackwardStart,
    keeps_sent: bool,
    micro_batches: int,
) -> Bytes:
    """Return what a rank keeps of other passes when a backward starts.

    `kept_gradients` is the bytes of each stage's gradients that exist then. `keeps_sent` is whether tensors that were
    sent are kept until the end of the step.
    """
    gradients = buffers = activations = loss = temporaries = 0
    for index, cost in enumerate(costs):
        pending, awaiting = start.pending[index], start.awaiting_weight_grad[index]
        sent, sent_back = start.forwards[index], awaiting + start.done[index]
        if not keeps_sent:
            sent, sent_back = pending, min(1, sent_back)
        if index != start.stage:
            is_done = start.done[index] == micro_batches
            buffers += cost.whole_bytes if start.forwards[index] and not is_done else 0
            buffers += cost.retained_bytes if start.done[index] and not is_done else 0
            buffers += 0 if is_done else cost.old_bucket_bytes
        else:  # the pass itself is added by the caller
            pending, awaiting = (pending, awaiting - 1) if start.kind == "weights" else (pending - 1, awaiting)
        passes = pending + awaiting
        gradients += kept_gradients[index]
        activations += passes * cost.activations.before_backward
        buffers += sent * cost.output_bytes + sent_back * cost.input_bytes - passes * cost.received_input_bytes
        loss += pending * cost.log_probability_bytes
        temporaries += awaiting * cost.deferred_grad_bytes
    return dict(zip(PARTS, (gradients, buffers, activations, loss, temporaries), strict=True))


def highest_step_peak(
    costs: Sequence[StageCost],
    gradients: Sequence[int],
    sums: Sequence[int],
    at_start: Sequence[int],
    starts: Sequence[BackwardStart],
    keeps_sent: bool,
    micro_batches: int,
) -> Bytes:
    """Return the rank's bytes at the worst moment of all backwards of a step: of that pass and of all that is kept.

    `gradients` is the most bytes of each stage's gradients, `sums` is those that are kept from one micro-batch to the
    next, and `at_start` is those that exist when a step begins.
    """
    of_pass: dict[tuple[int, PassKind, int, bool, Pass], Bytes] = {}  # the worst moment of each different pass
    highest, total = dict.fromkeys(PARTS, 0), -1
    for start in starts:
        kept_sizes = [sums[stage] if done else at_start[stage] for stage, done in enumerate(start.done)]
        index, own = start.stage, costs[start.stage]
        new_gradients = gradients[index] - kept_sizes[index]
        reduces_copies = own.reduced_last_elements > 0 and start.pending[index] == 1  # in the last pass
        done = start.done[index]
        moment = ONLY_PASS
        if own.reduces_groups or own.old_bucket_bytes:
            moment = Pass(done == 0, start.forwards[index] == 1, done + 1 == micro_batches)
        key = (index, start.kind, new_gradients, reduces_copies, moment)
        peak = of_pass.get(key)
        if peak is None:
            peaks = list(backward_peaks(own, start.kind, new_gradients, reduces_copies, moment))
            for each in peaks:  # the buffer that received the pass's input is counted by itself
                received = own.received_input_bytes if "activations" in each else 0
                each["buffers"] = each.get("buffers", 0) - received
            peak = of_pass[key] = max(peaks, key=lambda moment: sum(moment.values()))
        between = bytes_between_passes(costs, kept_sizes, start, keeps_sent, micro_batches)
        size = sum(between.values()) + sum(peak.values())
        if size > total:
            highest, total = {name: number + peak.get(name, 0) for name, number in between.items()}, size
    return highest
