"""The bytes of the tensors that a micro-batch's passes meet in every stage, computed once for its shape. No torch."""

from dataclasses import dataclass
from functools import lru_cache

from harness.cost_model.activations import (
    block_backward_bytes,
    deferred_weight_grad_inputs,
    logits_bytes,
    loss_tensors,
    norm_backward_bytes,
    norm_gradient_bytes,
    recompute_allreduce_bytes,
)
from harness.cost_model.attention_activations import eager_score_tensors, forward_copies_bytes
from harness.cost_model.layer_backward import input_grad_reduction_bytes, whole_hidden_bytes
from harness.cost_model.micro_batch_shape import MicroBatchShape


@dataclass(frozen=True)
class MicroBatchBytes:
    """The bytes of one micro-batch's tensors on one rank, by what they are."""

    hidden: int  # this rank's part of the residual stream
    whole_hidden: int  # the hidden states of all of the rank's tokens
    logits: int  # in fp32
    loss: int  # logits and cross-entropy at their worst moment
    scores: int  # of attention's forward at its worst moment, with what it copies
    deferred: int  # what a backward for inputs alone leaves for one layer's weights
    norm_gradient: int
    norm_backward: int  # at the worst moment of a norm's backward
    input_grad_reduction: int  # of a matrix's input's gradient while ranks sum it
    block_backward: int  # of intermediates' gradients at the worst moment of a layer's backward
    recompute_allreduce: int  # at the end of a second forward, where ranks sum


@lru_cache(maxsize=1024)
def micro_batch_bytes(shape: MicroBatchShape) -> MicroBatchBytes:
    """Return the bytes of a micro-batch of this shape."""
    return MicroBatchBytes(
        hidden=shape.hidden_bytes,
        whole_hidden=whole_hidden_bytes(shape),
        logits=logits_bytes(shape),
        loss=sum(loss_tensors(shape).values()),
        scores=sum(eager_score_tensors(shape).values()) + forward_copies_bytes(shape),
        deferred=sum(deferred_weight_grad_inputs(shape).values()),
        norm_gradient=norm_gradient_bytes(shape),
        norm_backward=norm_backward_bytes(shape),
        input_grad_reduction=input_grad_reduction_bytes(shape),
        block_backward=block_backward_bytes(shape),
        recompute_allreduce=recompute_allreduce_bytes(shape),
    )
