"""The memory of a rank at the worst moments of a backward: its pass through a stage, and all else that is kept then.

Imports no torch.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial

from harness.config.checkpointing import CheckpointingConfig
from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.buffers import last_bucket_elements, old_bucket_bytes, transient_buffers
from harness.cost_model.deepspeed_memory import holds_gradients_twice
from harness.cost_model.layer_backward import deferred_weight_grad_bytes
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape, micro_batch_shape
from harness.cost_model.stage_activations import (
    LayerActivations,
    StageActivations,
    layer_backward_activations,
    offloaded_bytes,
    stage_activations,
    weight_grad_only_bytes,
    without_offloaded_activations,
)
from harness.cost_model.transient_buffers import (
    GroupSizes,
    Pass,
    TransientBuffers,
    group_sizes,
    shard_groups,
)
from harness.layout.layout import Layout
from harness.layout.partition import Stage, parameters_of_stage
from harness.layout.state_widths import StateWidths

Bytes = dict[str, int]  # by what fills them: gradients, buffers, activations, loss, temporaries


@lru_cache(maxsize=1024)
def local_parameter_count(model: ModelConfig, stage: Stage, tp: int, vocabulary_tp: int | None = None) -> int:
    """Return the number of a stage's parameters on the tensor-parallel rank that has most of them.

    Matrices are cut as the plan says, and the norms are not. `vocabulary_tp` is the number of parts of embedding and
    head, by default as many as of the other matrices.
    """
    vocabulary_parts = tp if vocabulary_tp is None else vocabulary_tp
    parameters = parameters_of_stage(model, stage)
    return sum(math.prod(parameter.largest_part(tp, vocabulary_parts)) for parameter in parameters)


@dataclass(frozen=True)
class StageCost:
    """The bytes that a pass through one of a rank's stages keeps and needs."""

    shape: MicroBatchShape
    stage: Stage
    activations: StageActivations
    weight_pass_activations: tuple[int, int]  # in a backward for weights alone, at its last layer and last matrix
    keeps_received_input: bool  # whether the stage's input is kept in the buffer that received it
    parameter_count: int
    has_16_bit_grads: bool  # whether backward computes gradients in 16 bit, and each is added to an fp32 sum at once
    reduced_last_elements: float  # of DDP's last bucket, which is reduced in an fp32 copy; 0 where there is none
    transient: Callable[[Pass], TransientBuffers]
    layer_activations: Callable[[int], LayerActivations]  # of the layer that so many layers of the stage follow
    whole_bytes: int  # of parameters that stay gathered from the first forward of a step to its last backward
    retained_bytes: int  # of gradients that were reduced last, from one micro-batch to the next
    old_bucket_bytes: int  # of the buckets before DDP's present ones, until the first of these is reduced
    groups: GroupSizes  # of the parameters that are gathered and reduced together, elements
    reduces_groups: bool  # whether gradients are reduced to shards group by group
    # Whether autograd adds one gradient of a matrix to another, as it does with those that DeepSpeed's own linear
    # function returns. Those of torch's are views, which it leaves as they are.
    sums_in_place: bool
    allocates_gradients_late: bool  # when gradients are reduced, as DeepSpeed's stage 2 does
    offloaded_bytes: int  # of the activations of a pass that activation offload moves to the host

    @cached_property
    def input_bytes(self) -> int:
        """Bytes that a pass receives, and sends back as their gradient."""
        return 0 if self.stage.holds_embedding else self.shape.hidden_bytes

    @cached_property
    def output_bytes(self) -> int:
        """Bytes that a pass sends, and receives back as their gradient."""
        return 0 if self.stage.holds_head else self.shape.hidden_bytes

    @cached_property
    def received_input_bytes(self) -> int:
        """Bytes of the kept activations that lie in the buffer that received them."""
        return self.input_bytes if self.keeps_received_input else 0

    @cached_property
    def waiting_exceeds_sent_back(self) -> bool:
        """Whether a pass that waits for its backward keeps at least what its gradient takes that is sent back."""
        waiting = self.activations.before_backward - self.received_input_bytes
        return waiting + self.log_probability_bytes >= self.input_bytes

    @cached_property
    def log_probability_bytes(self) -> int:
        """Bytes of log-probabilities kept for backward; 0 where the loss goes through its tokens in parts."""
        return self.shape.logits_bytes if self.stage.holds_head and self.shape.loss_chunks == 1 else 0

    @property
    def recomputed_log_probability_bytes(self) -> int:
        """Bytes of log-probabilities that the second forward of a part of the loss keeps."""
        return self.shape.logits_bytes if self.stage.holds_head and self.shape.loss_chunks > 1 else 0

    @cached_property
    def logits_grad_bytes(self) -> int:
        """Bytes of the gradient of the logits, in the width of compute."""
        return (self.log_probability_bytes + self.recomputed_log_probability_bytes) * self.shape.width // FP32_BYTES

    @cached_property
    def deferred_grad_bytes(self) -> int:
        """Bytes of gradients that a backward for inputs alone, which frees nothing, leaves for the weights' half."""
        layers = self.stage.layers * deferred_weight_grad_bytes(self.shape)
        return layers + self.logits_grad_bytes + self.stage.holds_head * self.shape.norm_gradient_bytes

    @property
    def weight_pass_grad_bytes(self) -> tuple[int, int]:
        """Bytes of weights' gradients at the last layer of a backward for weights alone, and at its last matrix.

        In 16 bit, and where fully_shard reduces them, they are all that it computed so far, as it adds them to the sums
        at its end; in fp32 one at a time.
        """
        matrix = self.vocabulary_grad_bytes if self.stage.holds_head else 0
        if self.has_16_bit_grads or self.reduces_groups:
            layers = self.parameter_count * self.shape.width - matrix
            return layers - layers // self.stage.layers, layers + matrix
        inner = self.shape.model.hidden_size * self.shape.model.intermediate_size * self.shape.width // self.shape.tp
        return inner, matrix or inner

    @cached_property
    def vocabulary_grad_bytes(self) -> int:
        """Bytes of the gradient of embedding or head, the largest matrices, as backward computes it."""
        rows = math.ceil(self.shape.model.vocab_size / self.shape.vocabulary_tp)
        return rows * self.shape.model.hidden_size * self.shape.width

    def computed_gradients(self, new_gradients: int, following: int) -> float:
        """Return how many bytes of a pass's new gradients exist when backward has left so many layers behind.

        That of tied matrices is complete only when backward ends.
        """
        if self.allocates_gradients_late:
            return 0
        waits = self.shape.model.tie_word_embeddings or (self.reduces_groups and self.stage.count > 1)
        head = 0 if waits else self.groups.head
        return new_gradients * (head + following * self.groups.layer) / self.groups.total

    @cached_property
    def waiting_grad_bytes(self) -> int:
        """Bytes of the gradient of a tied head, which waits for the embedding's; a group's is among the buffers."""
        is_tied = self.stage.holds_head and self.shape.model.tie_word_embeddings
        return self.vocabulary_grad_bytes if is_tied and not self.reduces_groups else 0

    @property
    def grad_accumulate_bytes(self) -> int:
        """Bytes of the largest matrix's gradient while it is added to an earlier sum; a CPU widens it first."""
        widened = self.vocabulary_grad_bytes * FP32_BYTES // self.shape.width
        return self.vocabulary_grad_bytes + (widened if self.has_16_bit_grads and self.shape.device == "cpu" else 0)


def stage_costs(
    config: RunConfig,
    layout: Layout,
    device: Device,
    stages: Sequence[Stage],
    widths: StateWidths | None = None,
) -> list[StageCost]:
    """Return the costs of a rank's stages; device is cpu or cuda. Without widths they have no transient buffers."""
    shape = micro_batch_shape(config, layout, device)
    norm_keeps_input = shape.width == FP32_BYTES or not shape.norm_is_decomposed  # without an fp32 copy
    reduces_copies = layout.data_parallel == "ddp" and config.precision.is_mixed
    holds_twice = widths is not None and holds_gradients_twice(config, layout, widths)
    costs = []
    for stage in stages:
        checkpointing = config.checkpointing
        activations = stage_activations(shape, stage, checkpointing)
        at_layer, at_matrix = weight_grad_only_bytes(shape, stage, checkpointing)
        offloaded = offloaded_bytes(shape, stage, checkpointing) if checkpointing.offload_activations else 0
        moved = offloaded if device != "cpu" else 0  # on a CPU the host's memory is the device's
        if moved:
            other_layers = offloaded - offloaded // stage.layers
            activations = without_offloaded_activations(activations, offloaded, stage.layers)
            at_layer, at_matrix = at_layer - other_layers, max(0, at_matrix - other_layers)
        whole_bytes = retained_bytes = 0
        if layout.data_parallel == "fsdp" and widths is not None:
            groups = shard_groups(config.model, layout, stage)
            whole_bytes = groups.padded * widths.gathered * (layout.zero_stage < 3)
            retained_bytes = groups.last_reduced.padded * config.precision.reduce_bytes
        costs.append(
            StageCost(
                shape,
                stage,
                activations,
                weight_pass_activations=(at_layer, at_matrix),
                keeps_received_input=norm_keeps_input or checkpointing.recomputes_layer(stage.first_layer),
                parameter_count=local_parameter_count(config.model, stage, layout.tp, layout.vocabulary_tp),
                has_16_bit_grads=config.precision.is_mixed and not holds_twice,
                reduced_last_elements=last_bucket_elements(config, layout, stage) if reduces_copies else 0,
                groups=group_sizes(config.model, layout, stage),
                reduces_groups=layout.data_parallel == "fsdp",
                sums_in_place=widths is not None and widths.recomputes_last_projection,
                allocates_gradients_late=layout.uses_deepspeed_zero and layout.zero_stage == 2,
                layer_activations=partial(activations_in_layer, shape, stage, checkpointing, moved),
                transient=cache(partial(transient_buffers, config, layout, widths, stage, device)),
                whole_bytes=whole_bytes,
                retained_bytes=retained_bytes,
                old_bucket_bytes=old_bucket_bytes(config, layout, stage),
                offloaded_bytes=offloaded,
            )
        )
    return costs


def activations_in_layer(
    shape: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig, offloaded: int, following: int
) -> LayerActivations:
    """Return the bytes in the backward of the layer that so many follow, if this many of a pass go to the host."""
    layer = layer_backward_activations(shape, stage, checkpointing, following)
    if not offloaded:
        return layer
    activations = dataclasses.replace(stage_activations(shape, stage, checkpointing), layers=(layer,))
    return without_offloaded_activations(activations, offloaded, stage.layers).layers[0]
