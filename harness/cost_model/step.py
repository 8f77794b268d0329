"""The tape of one micro-batch's pass through a stage: its forward, and its backward or one half of it. No torch."""

from harness.cost_model.sharding import Pass, Sharding


def play_pass(sharding: Sharding, each: Pass) -> None:
    """Play a pass, without what the rank keeps of others and of its state."""
    # The buffer that received the pass's input is counted with all those of a step.
    each.live["buffers_received"] = -each.activations.received_input_bytes
    if each.kind == "weights":
        play_weights(sharding, each)
    else:
        play_forward(sharding, each)
        each.phase = "backward"
        play_head(sharding, each)
        play_backward = play_inputs if each.kind == "inputs" else play_layers
        play_backward(sharding, each)


def play_forward(sharding: Sharding, each: Pass) -> None:
    """Play forward up to the head, through attention's scores in the last layer; and the loss, if it has parts."""
    activations = each.activations
    sharding.begin(each)
    for following in reversed(sharding.played_layers(activations.stage.layers)):
        each.live["activations"] = outside = activations.outside(following)
        sharding.forward(each, following)
        own = activations.layers[following]
        if following == 0:
            each.live["activations"] = outside + own.at_scores
            each.touch(temporaries=own.scores)
        each.put(activations=outside + own.saved)
        each.touch(temporaries=own.sums)
    sharding.forward_head(each)
    each.put(activations=activations.before_backward)
    each.touch(loss=activations.forward_loss_bytes * (activations.shape.loss_chunks > 1))
    sharding.end_forward(each)


def play_head(sharding: Sharding, each: Pass) -> None:
    """Play the loss, and the backward of loss, head and final norm; without a head the start of backward.

    Backward of the last part of the loss has the gradients of the hidden states of all parts before it. The head
    computes the parts itself, and backward needs its parameters before their second forward.
    """
    activations, shape = each.activations, each.activations.shape
    if not activations.stage.holds_head:
        sharding.enter_backward(each)
        return
    chunks, matrix, hidden_grad = shape.loss_chunks, sharding.vocabulary_grad_bytes, shape.whole_hidden_bytes
    earlier_hidden_grads = hidden_grad * (chunks - 1) // chunks
    shared_grads = matrix + earlier_hidden_grads if chunks > 1 else 0  # of what the parts share
    if each.kind == "backward" and chunks > 1:
        sharding.enter_backward(each)
    each.touch(loss=activations.loss_bytes, temporaries=shared_grads)
    if each.kind == "backward":
        in_product = hidden_grad + (1 + (chunks > 1)) * matrix + activations.logits_grad_bytes
        # The gradients of the first two parts may be summed beside both, and all others are added to that sum. If there
        # are no others, what the head kept, of as many bytes as its gradient, is freed by then.
        summed = 2 * hidden_grad // chunks * (chunks > 2) + (3 - sharding.sums_in_place) * matrix if chunks > 1 else 0
        each.put(temporaries=activations.logits_grad_bytes)
        if chunks == 1:
            sharding.enter_backward(each)
        each.put(temporaries=max(in_product, summed))
        each.live["activations"] = activations.in_final_norm
        sharding.head_gradient(each)
    in_norm = max(shape.norm_backward_bytes, shape.input_grad_reduction_bytes)
    each.put(activations=activations.in_final_norm, temporaries=in_norm)
    if each.kind == "backward":
        each.live["temporaries"] = shape.hidden_bytes
        sharding.leave_head(each)


def play_layers(sharding: Sharding, each: Pass) -> None:
    """Play the backward of the stage's layers, of which so many follow each, and the end of the pass.

    The gradient that another stage sends lies in the buffer that received it, and is counted with these buffers.
    """
    activations, hidden = each.activations, each.activations.shape.hidden_bytes
    for following in sharding.played_layers(activations.stage.layers):
        outside, layer = activations.outside(following), activations.layers[following]
        is_sent = following == 0 and not activations.stage.holds_head
        each.live |= {"activations": outside + layer.saved, "temporaries": hidden * (not is_sent)}
        sharding.enter_layer(each, following)
        for moment in layer.moments:
            temporaries = moment.temporaries - moment.arrived * is_sent
            each.live |= {"activations": outside + moment.saved, "temporaries": temporaries}
            sharding.in_layer(each, following, moment)
        each.live["temporaries"] = hidden
        sharding.leave_layer(each, following)
    each.drop("activations", "buffers_received", "temporaries", "temporaries_waiting")
    sharding.end(each)


def play_inputs(sharding: Sharding, each: Pass) -> None:
    """Play a backward for inputs alone, which frees nothing and leaves gradients for the weights' half."""
    activations, layer = each.activations, each.activations.layers[0]
    outside, of_others = activations.before_backward - layer.saved, activations.deferred_grad_bytes - layer.deferred
    each.live |= {
        "activations": activations.before_backward,
        "temporaries": 0,
        "loss": activations.log_probability_bytes,
    }
    sharding.enter_layer(each, 0)
    each.live["gradients"] = 0
    for moment in layer.moments:
        temporaries = of_others + moment.deferred + moment.temporaries
        each.put(activations=outside + moment.saved + moment.freed, temporaries=temporaries)


def play_weights(sharding: Sharding, each: Pass) -> None:
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
    sharding.begin(each)
    sharding.end_forward(each)
    each.phase = "backward"
    each.put(activations=at_layer, temporaries=left + grads_at_layer)
    each.put(activations=at_matrix, temporaries=activations.logits_grad_bytes + grads_at_matrix)
    each.drop("activations", "temporaries")
    sharding.collect(each)
