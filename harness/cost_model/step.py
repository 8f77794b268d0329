"""The tape of one micro-batch's pass through a stage: its forward, and its backward or one half of it. No torch."""

from harness.cost_model.sharding import Pass, Sharding
from harness.cost_model.tape import Tape


def play_pass(sharding: Sharding, each: Pass) -> Tape:
    """Return the tape of a pass, without what the rank keeps of others and of its state."""
    tape = Tape()
    # The buffer that received the pass's input is counted with all those of a step.
    tape.live["buffers_received"] = -each.activations.received_input_bytes
    if each.kind == "weights":
        play_weights(tape, sharding, each)
        return tape
    play_forward(tape, sharding, each)
    tape.phase = "backward"
    play_head(tape, sharding, each)
    if each.kind == "inputs":
        play_inputs(tape, sharding, each)
        return tape
    for following in sharding.played_layers(each.activations.stage.layers):
        play_layer(tape, sharding, each, following)
    tape.drop("activations", "buffers_received", "temporaries", "temporaries_waiting")
    sharding.end(tape, each)
    return tape


def play_forward(tape: Tape, sharding: Sharding, each: Pass) -> None:
    """Play forward up to the head, through attention's scores in the last layer."""
    activations = each.activations
    sharding.begin(tape, each)
    for following in reversed(sharding.played_layers(activations.stage.layers)):
        tape.live["activations"] = outside = activations.outside(following)
        sharding.forward(tape, each, following)
        own = activations.layers[following]
        if following == 0:
            tape.live["activations"] = outside + own.at_scores
            tape.touch(temporaries=own.scores)
        tape.put(activations=outside + own.saved)
    sharding.forward(tape, each, -1)
    tape.put(activations=activations.before_backward)
    sharding.end_forward(tape, each)


def play_head(tape: Tape, sharding: Sharding, each: Pass) -> None:
    """Play the loss, and the backward of loss, head and final norm; without a head the start of backward.

    Backward of the last part of the loss has the gradients of the hidden states of all parts before it.
    """
    activations, shape = each.activations, each.activations.shape
    if not activations.stage.holds_head:
        sharding.enter_backward(tape, each)
        return
    chunks, matrix, hidden_grad = shape.loss_chunks, sharding.vocabulary_grad_bytes, shape.whole_hidden_bytes
    earlier_hidden_grads = hidden_grad * (chunks - 1) // chunks
    shared_grads = matrix + earlier_hidden_grads if chunks > 1 else 0  # of what the parts share
    tape.touch(loss=activations.loss_bytes, temporaries=shared_grads)
    if each.kind == "backward":
        in_product = hidden_grad + (1 + (chunks > 1)) * matrix + activations.logits_grad_bytes
        # The gradients of the parts are summed: the sum so far, the summand, and where it is another tensor their sum.
        summed = earlier_hidden_grads + (3 - sharding.sums_in_place) * matrix if chunks > 1 else 0
        tape.put(temporaries=activations.logits_grad_bytes)
        sharding.enter_backward(tape, each)
        tape.put(temporaries=max(in_product, summed))
        tape.live["activations"] = activations.in_final_norm
        sharding.head_gradient(tape, each)
    in_norm = max(shape.norm_backward_bytes, shape.input_grad_reduction_bytes)
    tape.put(activations=activations.in_final_norm, temporaries=in_norm)
    if each.kind == "backward":
        tape.live["temporaries"] = shape.hidden_bytes
        sharding.leave_head(tape, each)


def play_layer(tape: Tape, sharding: Sharding, each: Pass, following: int) -> None:
    """Play the backward of the layer that so many layers of the stage follow.

    The gradient that another stage sends lies in the buffer that received it, and is counted with these buffers.
    """
    activations, outside = each.activations, each.activations.outside(following)
    layer, hidden = activations.layers[following], activations.shape.hidden_bytes
    is_sent = following == 0 and not activations.stage.holds_head
    tape.live |= {"activations": outside + layer.saved, "temporaries": hidden * (not is_sent)}
    sharding.enter_layer(tape, each, following)
    for moment in layer.moments:
        temporaries = moment.temporaries - moment.arrived * is_sent
        tape.live |= {"activations": outside + moment.saved, "temporaries": temporaries}
        sharding.in_layer(tape, each, following, moment)
    tape.live["temporaries"] = hidden
    sharding.leave_layer(tape, each, following)


def play_inputs(tape: Tape, sharding: Sharding, each: Pass) -> None:
    """Play a backward for inputs alone, which frees nothing and leaves gradients for the weights' half."""
    activations, layer = each.activations, each.activations.layers[0]
    outside, of_others = activations.before_backward - layer.saved, activations.deferred_grad_bytes - layer.deferred
    saved = {"activations": activations.before_backward, "loss": activations.log_probability_bytes}
    tape.live |= saved | {"temporaries": 0}
    sharding.enter_layer(tape, each, 0)
    tape.live["gradients"] = 0
    for moment in layer.moments:
        temporaries = of_others + moment.deferred + moment.temporaries
        tape.put(activations=outside + moment.saved + moment.freed, temporaries=temporaries)


def play_weights(tape: Tape, sharding: Sharding, each: Pass) -> None:
    """Play the end of a backward for weights alone: at the last layer, and at the last matrix.

    In 16 bit, and where groups are reduced, there are all gradients that it computed so far, as it adds them to the
    sums at its end; in fp32 one at a time.
    """
    activations, shape = each.activations, each.activations.shape
    stage, matrix = activations.stage, sharding.vocabulary_grad_bytes * activations.stage.holds_head
    grads_at_layer = each.groups.layer.largest * shape.width
    grads_at_matrix = matrix or grads_at_layer
    if sharding.has_16_bit_grads or sharding.reduces_groups:
        of_layers = each.groups.elements * shape.width - matrix
        grads_at_layer, grads_at_matrix = of_layers - of_layers // stage.layers, of_layers + matrix
    at_layer, at_matrix = activations.in_weights_pass
    left = activations.deferred_grad_bytes - (stage.layers - 1) * activations.layers[0].deferred
    sharding.begin(tape, each)
    sharding.end_forward(tape, each)
    tape.phase = "backward"
    tape.put(activations=at_layer, temporaries=left + grads_at_layer)
    tape.put(activations=at_matrix, temporaries=activations.logits_grad_bytes + grads_at_matrix)
