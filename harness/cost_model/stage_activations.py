"""The bytes that a pass through a pipeline stage keeps for backward, and when. Imports no torch."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.config.checkpointing import CheckpointingConfig
from harness.cost_model.activations import (
    block_tensors,
    consumed_by_recompute,
    layer_activations,
    norm_tensors,
    recomputed_tensors,
)
from harness.cost_model.layer_backward import BEFORE_SCORES, Moment, Recomputation, layer_backward_moments
from harness.cost_model.micro_batch_shape import INT64_BYTES, MicroBatchShape
from harness.layout.layout import Layout
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths


@dataclass(frozen=True)
class LayerActivations:
    """The bytes kept for backward when it is in one of a stage's layers, those of the layers before it included."""

    following: int  # the number of the stage's layers that backward has left behind
    outside: int  # without those of the layer itself
    own: "OneLayerActivations"  # of the layer itself
    at_scores: int  # when its forward computes its attention


@dataclass(frozen=True)
class OneLayerActivations:
    """The bytes that one layer keeps for backward, whatever the stage that has it."""

    saved: int  # when its forward has ended
    recomputed: int  # by its second forward, beside what it keeps; without what that takes and frees
    kept_for_weights: int  # for the weights' half of a backward, a second forward's tensors included
    at_scores: int  # when its forward computes its attention
    moments: tuple[Moment, ...]  # of its backward: those that can be the worst one
    all_moments: tuple[Moment, ...]
    weight_moments: tuple[Moment, ...]  # all, without their bytes, which is the same for all micro-batches
    most_saved: int  # at any moment of its backward
    saved_at_end: int  # at the last moment of its backward


@dataclass(frozen=True)
class StageActivations:
    """The bytes kept for backward by one micro-batch's pass through a stage, without the logits."""

    before_backward: int
    in_final_norm: int  # in the final norm's backward, without what that freed; 0 without the head
    in_head: int  # those of the final norm and the head
    layers: tuple[LayerActivations, ...]  # the last layer, the one before it and the first, each once
    recomputed: int  # by one layer's second forward; 0 without checkpointing


@lru_cache(maxsize=4096)
def stage_activations(shape: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig) -> StageActivations:
    """Return the bytes that a pass through a stage keeps, with what the backward of its layers recomputes."""
    norm = head_tensors(shape, stage)
    saved, head = saved_by_layers_bytes(shape, stage, checkpointing), sum(norm.values())
    return StageActivations(
        before_backward=saved + head,
        in_final_norm=saved + head - weight_pass_bytes(norm, shape) if stage.holds_head else 0,
        in_head=head,
        layers=tuple(
            layer_backward_activations(shape, stage, checkpointing, following)
            for following in observed_layers(stage.layers)
        ),
        recomputed=one_layer_activations(
            shape, checkpointing, checkpointing.recomputes_layer(stage.layer_indices[-1])
        ).recomputed,
    )


def observed_layers(layers: int) -> list[int]:
    """Return how many layers follow the last one of a stage, the one before it and the first, each once.

    Of all layers' backwards only theirs can be the worst: from one to the next, activations and gradients change by
    the same bytes.
    """
    return sorted({0, min(1, layers - 1), layers - 1})


def layer_backward_activations(
    shape: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig, following: int
) -> LayerActivations:
    """Return the bytes kept at the moments of the backward of the layer that so many of the stage's layers follow."""
    indices = stage.layer_indices[: stage.layers - following]
    own = one_layer_activations(shape, checkpointing, checkpointing.recomputes_layer(indices[-1]))
    outside = saved_by_layers_bytes(shape, stage, checkpointing, indices) - own.saved
    return LayerActivations(following, outside, own, outside + own.at_scores)


@lru_cache(maxsize=4096)
def one_layer_activations(
    shape: MicroBatchShape, checkpointing: CheckpointingConfig, is_recomputed: bool
) -> OneLayerActivations:
    """Return what a layer keeps; layers differ by whether they are recomputed."""
    saved = layer_activations(shape, checkpointing, is_recomputed)
    recomputed = recomputed_tensors(shape, checkpointing, is_recomputed)
    until_scores = {name: size for name, size in block_tensors(shape).items() if name.startswith(BEFORE_SCORES)}
    if is_recomputed:  # it keeps its input, and selectively the product that makes the scores
        until_scores = {name: size for name, size in until_scores.items() if not name.startswith("input_layernorm")}
        names = {"input", "scores"}
        if shape.cp == 1:  # with context parallelism the plan of that moment is 0.2 % too high without these
            # The norm's output, which attention has as its argument, and saved products beside the rotated ones.
            rotated = set() if shape.model.architecture.learned_positions else {"q_proj", "k_proj"}
            names |= {"input_layernorm.output"} | rotated
        until_scores |= {name: size for name, size in (block_tensors(shape) | saved).items() if name in names}
    consumed = consumed_by_recompute(shape, checkpointing)
    recomputation = Recomputation(recomputed, consumed, whole_layer=is_recomputed)
    moments = layer_backward_moments(shape, saved, recomputation)
    for_weights = sum(saved.values()) - layer_weight_grad_bytes(shape, is_recomputed)
    return OneLayerActivations(
        saved=sum(saved.values()),
        recomputed=sum(recomputed.values()) - is_recomputed * sum(consumed.values()),
        kept_for_weights=for_weights + is_recomputed * sum(recomputed.values()),
        at_scores=sum(until_scores.values()),
        moments=possible_peaks(moments),
        all_moments=tuple(moments),
        weight_moments=tuple(dataclasses.replace(moment, saved=0, temporaries=0) for moment in moments),
        most_saved=max(moment.saved for moment in moments),
        saved_at_end=moments[-1].saved,
    )


def possible_peaks(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Return the moments of which one is the worst, and the first of equally bad ones, however wide gradients are.

    More bytes, more complete gradients and a larger new gradient are never better, and adding a gradient to the
    parameter's is never better than computing it.
    """

    def exceeds(other: Moment, moment: Moment, is_later: bool) -> bool:
        """Return whether the other moment is at least as bad, and if it is a later one certainly worse."""
        size, other_size = moment.saved + moment.temporaries, other.saved + other.temporaries
        return (
            (other_size > size if is_later else other_size >= size)
            and other.weights >= moment.weights
            and other.computed >= moment.computed
            and other.is_accumulation >= moment.is_accumulation
        )

    return tuple(
        moment
        for index, moment in enumerate(moments)
        if not any(exceeds(other, moment, at > index) for at, other in enumerate(moments) if at != index)
    )


@lru_cache(maxsize=4096)
def weight_grad_only_bytes(shape: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig) -> tuple[int, int]:
    """Return the bytes saved when a backward for weights alone reaches the last layer, and when it reaches its end.

    It goes through the layers from first to last, and ends with the last matrix. It frees the tensors from which it
    computes gradients at once and all others at its end; where layers are recomputed, these include every tensor of a
    second forward.
    """
    block, norm = block_tensors(shape), head_tensors(shape, stage)
    head, left = sum(norm.values()), saved_by_layers_bytes(shape, stage, checkpointing)
    for is_recomputed, count in layers_by_kind(checkpointing, stage.layer_indices):
        own = one_layer_activations(shape, checkpointing, is_recomputed)
        left += count * (own.kept_for_weights - own.saved)
    freed = weight_pass_bytes(norm, shape) + layer_norm_statistics_bytes(norm, shape)
    used_by_last_layer = layer_weight_grad_bytes(shape, checkpointing.recomputes_layer(stage.layer_indices[-1]))
    used_by_last_matrix = head - freed + norm["norm.output"] if norm else block["mlp.product"]
    return left + used_by_last_layer + head, left + used_by_last_matrix


def saved_by_layers_bytes(
    shape: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig, layers: range | None = None
) -> int:
    """Return the bytes that a stage's layers keep, what they share, and what the embedding keeps.

    `layers` are the indices of those that backward has not left yet, by default all of the stage's.
    """
    indices = stage.layer_indices if layers is None else layers
    seq_len = shape.seq_len // shape.cp
    rotary_tables = (
        0 if shape.model.architecture.learned_positions else 2 * seq_len * shape.model.head_dim * shape.width
    )
    shared = rotary_tables + saved_by_embedding_bytes(shape, stage)
    kinds = layers_by_kind(checkpointing, indices)
    return shared + sum(count * one_layer_activations(shape, checkpointing, kind).saved for kind, count in kinds)


def layers_by_kind(checkpointing: CheckpointingConfig, layers: range) -> list[tuple[bool, int]]:
    """Return whether layers are recomputed, and how many of this range are so, for each kind that is there."""
    every = checkpointing.every
    recomputed = layers.stop // every - layers.start // every if checkpointing.recomputes_layer(every - 1) else 0
    return [(kind, count) for kind, count in ((True, recomputed), (False, len(layers) - recomputed)) if count]


def saved_by_embedding_bytes(shape: MicroBatchShape, stage: Stage) -> int:
    """Return the bytes of token ids, a mask of those that other ranks look up, positions, and the dropout's mask."""
    if not stage.holds_embedding:
        return 0
    positions = shape.seq_len // shape.cp * INT64_BYTES if shape.model.architecture.learned_positions else 0
    token_bytes = shape.tokens * (INT64_BYTES + (shape.vocabulary_tp > 1))
    return token_bytes + positions + shape.dropout_mask_bytes


def head_tensors(shape: MicroBatchShape, stage: Stage) -> dict[str, int]:
    """Return the bytes that the final norm keeps, by tensor; none in a stage without the head."""
    return norm_tensors("norm", shape) if stage.holds_head else {}


def layer_norm_statistics_bytes(tensors: dict[str, int], shape: MicroBatchShape) -> int:
    """Return the bytes that LayerNorm's one kernel reads again for the gradients of weight and bias.

    It has read them for its input's gradient. Other norms have none.
    """
    if shape.model.architecture.norm != "layer":
        return 0
    return sum(size for name, size in tensors.items() if name.endswith(("norm.input", "norm.mean", "norm.rstd")))


def layer_weight_grad_bytes(shape: MicroBatchShape, is_recomputed: bool) -> int:
    """Return the bytes that a layer keeps or recomputes for its weights' gradients and frees after them."""
    block = block_tensors(shape)
    statistics = layer_norm_statistics_bytes(block, shape)
    if statistics and is_recomputed:  # the first norm's input is the layer's, which stays
        statistics -= shape.hidden_bytes
    return weight_pass_bytes(block, shape) + statistics


def weight_pass_bytes(tensors: dict[str, int], shape: MicroBatchShape) -> int:
    """Return the bytes that only weights' gradients need: inputs of matrices, and what a decomposed norm scales."""
    suffixes = ["norm.output", "norm.normalized", "mlp.product"]
    if shape.model.attention == "eager":
        suffixes.append("attention.output")  # the flash kernel keeps it too
    return sum(size for name, size in tensors.items() if name.endswith(tuple(suffixes)))


def offloaded_bytes(shape: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig) -> int:
    """Return the bytes of a pass that activation offload moves: the layers', as the embedding's stay on the device."""
    return saved_by_layers_bytes(shape, stage, checkpointing) - saved_by_embedding_bytes(shape, stage)


def without_offloaded_activations(activations: StageActivations, offloaded: int, layers: int) -> StageActivations:
    """Return the bytes that stay on the device for a stage with so many layers if `offloaded` bytes go to the host.

    Copies run beside the computing: when backward begins the last layer's part is still leaving, and in its backward
    that of the layer before comes back.
    """
    layer = offloaded // layers

    def on_device(moment: LayerActivations) -> LayerActivations:
        left = layers - moment.following
        away = (left - min(2, left)) * layer
        return dataclasses.replace(moment, outside=moment.outside - away, at_scores=moment.at_scores - away)

    return dataclasses.replace(
        activations,
        before_backward=activations.before_backward - offloaded + layer,
        in_final_norm=max(0, activations.in_final_norm - (layers - min(2, layers)) * layer),
        layers=tuple(map(on_device, activations.layers)),
    )


def host_gradient_bytes(widths: StateWidths, layout: Layout, parameters: Sequence[int]) -> list[int]:
    """Return the bytes of offloaded gradients for each of a rank's stages, by its number of parameters.

    They are those that the optimizer reads, and are divided as its state is.
    """
    return [-(-widths.host_gradients * number // layout.shard_count("optimizer")) for number in parameters]
