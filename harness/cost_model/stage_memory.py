"""The memory of a rank at the worst moments of a backward: its pass through a stage, and all else that is kept then.

Imports no torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.activations import (
    block_backward_bytes,
    deferred_weight_grad_inputs,
    logits_bytes,
    loss_tensors,
    norm_backward_bytes,
    norm_gradient_bytes,
    recompute_allreduce_bytes,
)
from harness.cost_model.attention_activations import eager_score_tensors
from harness.cost_model.buffers import unsharded_grad_bytes
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape, micro_batch_shape
from harness.cost_model.pipeline import BackwardStart, PassKind
from harness.cost_model.stage_activations import (
    StageActivations,
    offloaded_bytes,
    stage_activations,
    weight_grad_only_bytes,
    without_offloaded_activations,
)
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, is_vocab_sharded, tp_shard_dim

Bytes = dict[str, int]  # by what fills them: gradients, buffers, activations, loss, temporaries


def local_parameter_count(model: ModelConfig, stage: Stage, tp: int, vocabulary_tp: int | None = None) -> int:
    """Return the number of a stage's parameters on the tensor-parallel rank that has most of them.

    Matrices are cut as the plan says, and the norms are not. `vocabulary_tp` is the number of parts of embedding and
    head, by default as many as of the other matrices.
    """
    vocabulary_parts = tp if vocabulary_tp is None else vocabulary_tp
    count = 0
    for name, shape in model_profile(model).parameter_shapes.items():
        if stage.holds(name):
            parts = vocabulary_parts if is_vocab_sharded(name, model) else tp
            dim = tp_shard_dim(name, model)
            count += math.prod(math.ceil(size / parts) if axis == dim else size for axis, size in enumerate(shape))
    return count


def vocabulary_parameter_count(model: ModelConfig, tp: int) -> int:
    """Return the number of the embedding's or the head's parameters on the rank that has most of them."""
    return math.ceil(model.vocab_size / tp) * model.hidden_size


@dataclass(frozen=True)
class StageCost:
    """The bytes that a pass through one of a rank's stages keeps and needs."""

    shape: MicroBatchShape
    stage: Stage
    activations: StageActivations
    weight_pass_activations: tuple[int, int]  # in a backward for weights alone, at its last layer and last matrix
    keeps_received_input: bool  # whether the stage's input is kept in the buffer that received it
    parameter_count: int
    has_16_bit_grads: bool  # whether backward computes gradients in 16 bit, which are summed in fp32
    unsharded_grad_bytes: int  # of gradients on their way to their shards
    offloaded_bytes: int  # of the activations of a pass that activation offload moves to the host

    @property
    def input_bytes(self) -> int:
        """Bytes that a pass receives, and sends back as their gradient."""
        return 0 if self.stage.holds_embedding else self.shape.hidden_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes that a pass sends, and receives back as their gradient."""
        return 0 if self.stage.holds_head else self.shape.hidden_bytes

    @property
    def received_input_bytes(self) -> int:
        """Bytes of the kept activations that lie in the buffer that received them."""
        return self.input_bytes if self.keeps_received_input else 0

    @property
    def log_probability_bytes(self) -> int:
        """Bytes of log-probabilities kept for backward; 0 where the loss goes through its tokens in parts."""
        return logits_bytes(self.shape) if self.stage.holds_head and self.shape.loss_chunks == 1 else 0

    @property
    def recomputed_log_probability_bytes(self) -> int:
        """Bytes of log-probabilities that the second forward of a part of the loss keeps."""
        return logits_bytes(self.shape) if self.stage.holds_head and self.shape.loss_chunks > 1 else 0

    @property
    def logits_grad_bytes(self) -> int:
        """Bytes of the gradient of the logits, in the width of compute."""
        return (self.log_probability_bytes + self.recomputed_log_probability_bytes) * self.shape.width // FP32_BYTES

    @property
    def deferred_grad_bytes(self) -> int:
        """Bytes of gradients that a backward for inputs alone, which frees nothing, leaves for the weights' half."""
        layers = self.stage.layers * sum(deferred_weight_grad_inputs(self.shape).values())
        return layers + self.logits_grad_bytes + self.stage.holds_head * norm_gradient_bytes(self.shape)

    @property
    def weight_pass_grad_bytes(self) -> tuple[int, int]:
        """Bytes of weights' gradients at the last layer of a backward for weights alone, and at its last matrix.

        In 16 bit they are all that it computed so far, as it adds them to the sums at its end; in fp32 one at a time.
        """
        matrix = self.vocabulary_grad_bytes if self.stage.holds_head else 0
        if self.has_16_bit_grads:
            layers = self.parameter_count * self.shape.width - matrix
            return layers - layers // self.stage.layers, layers + matrix
        inner = self.shape.model.hidden_size * self.shape.model.intermediate_size * self.shape.width // self.shape.tp
        return inner, matrix or inner

    @property
    def vocabulary_grad_bytes(self) -> int:
        """Bytes of the gradient of embedding or head, the largest matrices, as backward computes it."""
        return vocabulary_parameter_count(self.shape.model, self.shape.vocabulary_tp) * self.shape.width

    @property
    def grad_accumulate_bytes(self) -> int:
        """Bytes of the largest matrix's gradient while it is added to an earlier sum; a CPU widens it first."""
        widened = self.vocabulary_grad_bytes * FP32_BYTES // self.shape.width
        return self.vocabulary_grad_bytes + (widened if self.has_16_bit_grads and self.shape.device == "cpu" else 0)


def stage_costs(config: RunConfig, layout: Layout, device: Device, stages: Sequence[Stage]) -> list[StageCost]:
    """Return the costs of a rank's stages; device is cpu or cuda."""
    shape = micro_batch_shape(config, layout, device)
    norm_keeps_input = shape.width == FP32_BYTES or not shape.norm_is_decomposed  # without an fp32 copy
    costs = []
    for stage in stages:
        checkpointing = config.checkpointing
        activations = stage_activations(shape, stage, checkpointing)
        at_layer, at_matrix = weight_grad_only_bytes(shape, stage, checkpointing)
        offloaded = offloaded_bytes(shape, stage, checkpointing) if checkpointing.offload_activations else 0
        if offloaded and device != "cpu":  # on a CPU the host's memory is the device's
            other_layers = offloaded - offloaded // stage.layers
            activations = without_offloaded_activations(activations, offloaded, stage.layers)
            at_layer, at_matrix = at_layer - other_layers, max(0, at_matrix - other_layers)
        costs.append(
            StageCost(
                shape,
                stage,
                activations,
                weight_pass_activations=(at_layer, at_matrix),
                keeps_received_input=norm_keeps_input or checkpointing.recomputes_layer(stage.first_layer),
                parameter_count=local_parameter_count(config.model, stage, layout.tp, layout.vocabulary_tp),
                has_16_bit_grads=config.precision.is_mixed,
                unsharded_grad_bytes=unsharded_grad_bytes(config, layout, [stage]),
                offloaded_bytes=offloaded,
            )
        )
    return costs


def backward_peaks(cost: StageCost, kind: PassKind, new_gradients: int) -> Iterator[Bytes]:
    """Yield the bytes of a pass at the worst moments of its backward, in their order.

    `new_gradients` is the bytes of the gradients that this pass allocates; 0 if it adds to those of an earlier pass.
    """
    shape, activations, holds_head = cost.shape, cost.activations, cost.stage.holds_head
    layer_deferred = sum(deferred_weight_grad_inputs(shape).values())
    if kind == "weights":
        at_layer, at_matrix = cost.weight_pass_activations
        left = cost.deferred_grad_bytes - (cost.stage.layers - 1) * layer_deferred
        grads_at_layer, grads_at_matrix = cost.weight_pass_grad_bytes
        yield {"activations": at_layer, "temporaries": left + grads_at_layer}
        yield {"activations": at_matrix, "temporaries": cost.logits_grad_bytes + grads_at_matrix}
        return
    chunked = shape.loss_chunks > 1
    shared_grads = cost.vocabulary_grad_bytes + shape.hidden_bytes if chunked else 0  # of what the loss's parts share
    if holds_head:
        loss = sum(loss_tensors(shape).values())
        yield {"activations": activations.before_backward, "loss": loss, "temporaries": shared_grads}
    if holds_head and kind == "backward":
        matrix = max((1 + chunked) * cost.vocabulary_grad_bytes + cost.logits_grad_bytes, cost.grad_accumulate_bytes)
        yield {"activations": activations.before_backward, "temporaries": shape.hidden_bytes + matrix}
    yield {"activations": activations.in_last_norm, "temporaries": norm_backward_bytes(shape)}
    block = max(block_backward_bytes(shape), recompute_allreduce_bytes(shape) if activations.recomputed else 0)
    yield {"activations": activations.in_last_block, "temporaries": block, "buffers": cost.unsharded_grad_bytes}
    yield {"activations": activations.at_last_scores, "temporaries": sum(eager_score_tensors(shape).values())}
    if kind == "inputs":
        all_saved = {"activations": activations.before_backward, "loss": cost.log_probability_bytes}
        deferred = cost.deferred_grad_bytes
        yield all_saved | {"temporaries": deferred - layer_deferred + block + activations.recomputed}
        yield all_saved | {"temporaries": deferred + norm_backward_bytes(shape) - norm_gradient_bytes(shape)}
        return
    widened = cost.has_16_bit_grads * cost.vocabulary_grad_bytes  # the first gradient becomes the sum
    embedding_grad = widened if new_gradients else cost.grad_accumulate_bytes
    rest = max(0, cost.stage.holds_embedding * embedding_grad - cost.unsharded_grad_bytes)
    yield {"gradients": new_gradients, "temporaries": rest, "buffers": cost.unsharded_grad_bytes}


def step_peaks(
    costs: Sequence[StageCost],
    gradients: Sequence[int],
    keeps_gradients: bool,
    start: BackwardStart,
    keeps_sent: bool,
) -> Iterator[Bytes]:
    """Yield the rank's bytes at the worst moments of one backward of a step: of that pass and of all that is kept.

    `gradients` is the bytes of each stage's gradients, and `keeps_gradients` whether they exist when a step begins.
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
        totals["gradients"] += gradients[index] if has_gradients[index] else 0
        totals["activations"] += passes * cost.activations.before_backward
        totals["buffers"] += (
            sent * cost.output_bytes + sent_back * cost.input_bytes - passes * cost.received_input_bytes
        )
        totals["loss"] += pending * cost.log_probability_bytes
        totals["temporaries"] += awaiting * cost.deferred_grad_bytes
    own = costs[start.stage]
    for peak in backward_peaks(own, start.kind, 0 if has_gradients[start.stage] else gradients[start.stage]):
        peak["buffers"] = peak.get("buffers", 0) - (own.received_input_bytes if "activations" in peak else 0)
        yield {name: size + peak.get(name, 0) for name, size in totals.items()}
