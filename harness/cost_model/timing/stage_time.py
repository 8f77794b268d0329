"""The seconds of a rank of a pipeline: its layers, its ends, and what tensor, context and data parallelism expose."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.cost_model.dp_communication import gathers_often, reductions_per_step
from harness.cost_model.node_groups import RankGroup, secondary_group
from harness.cost_model.timing.collectives import all_reduce_seconds, gather_seconds, ring
from harness.cost_model.timing.kernels import embedding_seconds, head_seconds
from harness.cost_model.timing.layer_time import MicroBatchTime, StepSetting
from harness.cost_model.timing.zero_plus_plus_time import MESSAGES, dequantize_seconds, exchange_seconds
from harness.cost_model.zero_plus_plus import WEIGHT_BYTES
from harness.layout.layer_spec import numel
from harness.layout.model_profile import model_profile, trained_share
from harness.layout.partition import Stage, is_expert_weight

# The buckets in which gradients leave backward: the share that is reduced after it has ended.
LAST_BUCKET = 0.05


@dataclass(frozen=True)
class RankTime:
    """The seconds of a rank of the pipeline; what its ranks of data send is exposed, or hidden beside compute."""

    passes: MicroBatchTime
    per_micro_batch: float  # of all that a micro-batch takes
    data_per_micro_batch: float  # exposed
    data_per_step: float
    hidden_per_micro_batch: float
    hidden_per_step: float
    replica_share: float  # of the exposed seconds, those among replicas
    parameters: float  # that are trained, on one tensor-parallel rank, not sharded


def rank_time(step: StepSetting, layer: MicroBatchTime, stages: Sequence[Stage]) -> RankTime:
    """Return the seconds of a rank with stages of such layers, and what data parallelism adds.

    A tied head counts as well: gradients of both uses are in one table, but in a pipeline each end has its own.
    Stage 3 gathers parameters before use and reduces gradients, layer by layer (arXiv 2304.11277): the first layer's
    gather and the last layer's reduction have nothing to hide behind, nor have embedding and head. Replicas of shards
    reduce what the shards' ranks have of a layer after these have reduced it, in every micro-batch or in the last one.
    In lower stages each rank has all parameters. Stages 0 and 1 reduce once, beside the backward of the last
    micro-batch, stage 2 in every micro-batch; stages 1 and 2 gather the updated parameters.
    """
    config, layout, timing, widths = step.config, step.layout, step.timing, step.widths
    profile, layers = model_profile(config.model), sum(stage.layers for stage in stages)
    passes, is_stage_3 = stage_time(step, layer, stages), layout.zero_stage == 3
    shards, tensors = layout.axes_size(layout.sharding_axes), len(profile.layer_shapes)
    end_shapes = [profile.embedding_shapes for stage in stages if stage.holds_embedding]
    end_shapes += [profile.head_shapes for stage in stages if stage.holds_head]
    own_experts = [
        shape for name, shape in profile.layer_shapes.items() if is_expert_weight(name) and layout.ep_enabled
    ]
    of_experts = sum(map(math.prod, own_experts)) / layout.tp / layout.ep
    of_layer = numel(profile.layer_shapes) / layout.tp - of_experts * layout.ep
    of_ends = sum(map(numel, end_shapes)) / layout.vocabulary_tp
    shared = layers * of_layer + of_ends
    parameters = shared + layers * of_experts * (layout.ep // layout.undivided_ep("optimizer"))
    if is_stage_3:
        units = (
            _unit_seconds(step, of_layer, tensors - len(own_experts), is_layer=True),
            _unit_seconds(step, of_experts, len(own_experts), True),
        )
        gather, again, reduction, replica = (layers * sum(seconds) for seconds in zip(*units, strict=True))
        end_gather, end_again, end_reduction, end_replica = _unit_seconds(step, of_ends, tensors)
        gathers_beside = timing.prefetches_parameters and widths.prefetches_parameters
        reduces_beside = timing.prefetches_parameters and widths.overlaps_reduction  # both need a stream of their own
        is_recomputed = config.checkpointing.recomputes_layer(config.checkpointing.every - 1)
        hideable, gathered_again = 1 - 1 / max(1, layers), 1 + (widths.gathers_for_each_use and is_recomputed)
        sums_each_time = widths.repeats_in_micro_batches
    else:
        tensors = layers * tensors + len(end_shapes)
        experts = len(own_experts) * layers
        units = _unit_seconds(step, shared, tensors - experts), _unit_seconds(step, layers * of_experts, experts, True)
        gather, again, reduction, replica = (sum(seconds) for seconds in zip(*units, strict=True))
        end_gather = end_again = end_reduction = end_replica = 0.0
        gathers_beside = timing.overlaps_parameter_gather
        reduces_beside = timing.overlaps_gradient_reduction and widths.overlaps_reduction and not widths.reduces_at_end
        hideable, gathered_again = 1 - LAST_BUCKET, 0
        sums_each_time = (layout.zero_stage == 2 and not widths.reduces_at_end) or widths.repeats_in_micro_batches
    beside_backward = gathers_beside * gathered_again * again + reduces_beside * hideable * reduction
    hidden_backward = min(beside_backward, passes.backward)
    hidden_with_replicas = min(beside_backward + reduces_beside * hideable * replica, passes.backward)
    hidden_gather = min(gathers_beside * hideable * gather, passes.forward)
    sent = (  # seconds, those of them that are hidden, and whether every micro-batch has them
        (gather + end_gather + end_again, hidden_gather, gathers_often(layout, widths)),
        (
            gathered_again * again + reduction + end_reduction,
            hidden_backward,
            reductions_per_step(config, layout, widths) > 1,
        ),
        (replica + end_replica, hidden_with_replicas - hidden_backward, sums_each_time),
    )
    slices = timing.shard_slice_seconds * shards * tensors if layout.zero_stage in (1, 2) and shards > 1 else 0.0
    in_step = [seconds for seconds, _, _ in sent]
    if is_stage_3:
        micro_batches = layout.grad_accumulation_steps(config.train)
        in_step = [(seconds - hidden) * (micro_batches if is_often else 1) for seconds, hidden, is_often in sent]
    exposed_often, hidden_often = _sums(sent, in_every_micro_batch=True)
    exposed_once, hidden_once = _sums(sent, in_every_micro_batch=False)
    all_passes = passes.forward + passes.backward + passes.tp + passes.cp + passes.ep
    return RankTime(
        passes,
        per_micro_batch=all_passes + exposed_often + step.hardware.fitted.overlap_slowdown * hidden_often,
        data_per_micro_batch=exposed_often,
        data_per_step=exposed_once + slices,
        hidden_per_micro_batch=hidden_often,
        hidden_per_step=hidden_once,
        replica_share=in_step[-1] / sum(in_step) if any(in_step) else 0.0,
        parameters=parameters * trained_share(config.model),
    )


def _sums(sent: Iterable[tuple[float, float, bool]], *, in_every_micro_batch: bool) -> tuple[float, float]:
    """Return the exposed and the hidden seconds of what every micro-batch sends, or of what a step sends once."""
    chosen = [(seconds - hidden, hidden) for seconds, hidden, is_often in sent if is_often == in_every_micro_batch]
    return sum(exposed for exposed, _ in chosen), sum(hidden for _, hidden in chosen)


def stage_time(step: StepSetting, layer: MicroBatchTime, stages: Sequence[Stage]) -> MicroBatchTime:
    """Return the seconds of a rank's stages of such layers."""
    shape, layers, beside = step.shape, sum(stage.layers for stage in stages), step.timing.micro_batch_seconds
    vocabulary_group = step.group("tp") if shape.vocabulary_tp > 1 else RankGroup(1, 1)
    ends = [embedding_seconds(shape, step.hardware) for stage in stages if stage.holds_embedding]
    ends += [head_seconds(shape, step.hardware, step.timing) for stage in stages if stage.holds_head]
    sums = len(ends) * all_reduce_seconds(shape.whole_hidden_bytes, vocabulary_group, step.hardware)
    return MicroBatchTime(
        forward=layers * layer.forward + sum(forward for forward, _ in ends) + beside / 3,
        backward=layers * layer.backward + sum(backward for _, backward in ends) + beside * 2 / 3,
        tp=layers * layer.tp + sums,
        cp=layers * layer.cp,
        ep=layers * layer.ep,
    )


def _unit_seconds(
    step: StepSetting, parameters: float, tensors: int, of_experts: bool = False, is_layer: bool = False
) -> tuple[float, float, float, float]:
    """Return the seconds of gathering parameters for forward and backward, of reducing them, and of summing replicas'.

    Backward gathers secondary shards, and where these last until the update, so does forward in all micro-batches but
    the first. What replicas sum is a shard.
    Gradients of small parameters share a bucket, and one that is larger than a bucket is sent alone. Experts of which
    ranks have different ones are those of fewer ranks. Of all parameters the same share is taken to be trained.
    """
    if not parameters:
        return 0.0, 0.0, 0.0, 0.0
    hardware, widths, zero_stage = step.hardware, step.widths, step.layout.zero_stage
    own = step.layout.of_experts if of_experts else step.layout
    shards, replicas = step.group(*own.sharding_axes), step.group(*own.replica_axes)
    trained, (latency, _) = parameters * trained_share(step.config.model), ring(shards, hardware)
    reduced = trained * step.config.precision.reduce_bytes
    bucket = widths.reduce_bucket_elements  # of a message; 0 where a layer's, or a step's, are one
    reductions = min(tensors, math.ceil(trained / bucket)) if bucket else 1
    gathers = tensors if zero_stage == 3 and not widths.prefetches_parameters else 1
    gathers *= MESSAGES if widths.quantizes_gathers else 1
    reduce_seconds = gather_seconds if zero_stage and not widths.all_reduces_gradients else all_reduce_seconds
    width = WEIGHT_BYTES if widths.quantizes_gathers else widths.gathered
    gathered = parameters * (step.config.gathered_matrix_bytes(width) if is_layer else width)
    again = gather = (gather_seconds(gathered, shards, hardware) if zero_stage else 0.0) + (gathers - 1) * latency
    if step.layout.secondary_shards > 1:
        few = secondary_group(step.layout, step.gpus_per_node)
        again = gather_seconds(gathered, few, hardware) + (gathers - 1) * ring(few, hardware)[0]
        micro_batches = step.layout.grad_accumulation_steps(step.config.train) if widths.keeps_secondary_shards else 1
        gather = again + (gather - again) / micro_batches
    reduction = reduce_seconds(reduced, shards, hardware) + (reductions - 1) * latency
    if widths.exchange_devices:
        reduction = exchange_seconds(trained, tensors, shards, widths.exchange_devices, hardware)
    dequantization = widths.quantizes_gathers * dequantize_seconds(parameters, step.config.precision, hardware)
    among_replicas = all_reduce_seconds(reduced / shards.ranks, replicas, hardware)
    return gather + dequantization, again + dequantization, reduction, among_replicas
