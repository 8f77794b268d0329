"""The exposed seconds of data parallelism: gathering parameters, reducing gradients, and what compute hides of both."""

import math
from dataclasses import dataclass

from harness.cost_model.timing.kernels import all_reduce_seconds, gather_seconds, ring_latency
from harness.cost_model.timing.stage_time import MicroBatchTime, RankStages, StepSetting, stage_time
from harness.layout.layer_spec import numel
from harness.layout.model_profile import layer_parameter_count, model_profile

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
    parameters: float  # on one tensor-parallel rank, not sharded


def rank_time(step: StepSetting, layer: MicroBatchTime, stages: RankStages) -> RankTime:
    """Return the seconds of a rank with stages of such layers, and what data parallelism adds.

    A tied head counts as well: gradients of both uses are in one table, but in a pipeline each end has its own.
    Stage 3 gathers parameters before use and reduces gradients, layer by layer (arXiv 2304.11277): the first layer's
    gather and the last layer's reduction have nothing to hide behind, nor have embedding and head. Replicas of shards
    reduce what the shards' ranks have of a layer after these have reduced it, in every micro-batch or in the last one.
    In lower stages each rank has all parameters. Stages 0 and 1 reduce once, beside the backward of the last
    micro-batch, stage 2 in every micro-batch; stages 1 and 2 gather the updated parameters.
    """
    timing, widths, zero_stage, layers = step.timing, step.widths, step.layout.zero_stage, stages.layers
    checkpointing, is_stage_3 = step.config.checkpointing, zero_stage == 3
    layout, profile, passes = step.layout, model_profile(step.config.model), stage_time(step, layer, stages)
    shards, tensors = layout.axes_size(layout.sharding_axes), len(profile.layer_shapes)
    ends = numel(profile.embedding_shapes) * stages.holds_embedding + numel(profile.head_shapes) * stages.holds_head
    of_layer, of_ends = layer_parameter_count(step.config.model) / layout.tp, ends / layout.vocabulary_tp
    parameters = layers * of_layer + of_ends
    if is_stage_3:
        gather, reduction, replica = (layers * seconds for seconds in _unit_seconds(step, of_layer, tensors))
        end_gather, end_reduction, end_replica = _unit_seconds(step, of_ends, tensors)
        gathers_beside = timing.prefetches_parameters and widths.prefetches_parameters
        reduces_beside = timing.prefetches_parameters and widths.overlaps_reduction  # both need a stream of their own
        is_recomputed = checkpointing.recomputes_layer(checkpointing.every - 1)
        alone, gathered_again = 1 / max(1, layers), 1 + (widths.gathers_for_each_use and is_recomputed)
        sums_each_time = timing.reduces_replicas_every_micro_batch
    else:
        tensors = layers * tensors + stages.holds_embedding + stages.holds_head
        gather, reduction, replica = _unit_seconds(step, parameters, tensors)
        end_gather = end_reduction = end_replica = 0.0
        gathers_beside = timing.overlaps_parameter_gather
        reduces_beside = timing.overlaps_gradient_reduction and widths.overlaps_reduction
        alone, gathered_again, sums_each_time = LAST_BUCKET, 0, zero_stage == 2
    beside_backward = gathers_beside * gathered_again * gather + reduces_beside * (1 - alone) * reduction
    hidden_backward = min(beside_backward, passes.backward)
    hidden_with_replicas = min(beside_backward + reduces_beside * (1 - alone) * replica, passes.backward)
    hidden_gather = min(gathers_beside * (1 - alone) * gather, passes.forward)
    sent = (  # seconds, those of them that are hidden, and whether every micro-batch has them
        (gather + 2 * end_gather, hidden_gather, is_stage_3),
        (gathered_again * gather + reduction + end_reduction, hidden_backward, zero_stage >= 2),
        (replica + end_replica, hidden_with_replicas - hidden_backward, sums_each_time),
    )
    slices = timing.shard_slice_seconds * shards * tensors if zero_stage in (1, 2) and shards > 1 else 0.0
    exposed_often = sum(seconds - hidden for seconds, hidden, is_often in sent if is_often)
    hidden_often = sum(hidden for _, hidden, is_often in sent if is_often)
    micro_batches = layout.grad_accumulation_steps(step.config.train)
    in_step = [(seconds - hidden) * (micro_batches if is_often else 1) for seconds, hidden, is_often in sent]
    if not is_stage_3:
        in_step = [seconds for seconds, _, _ in sent]
    return RankTime(
        passes,
        per_micro_batch=passes.seconds + exposed_often + step.hardware.fitted.overlap_slowdown * hidden_often,
        data_per_micro_batch=exposed_often,
        data_per_step=sum(seconds - hidden for seconds, hidden, is_often in sent if not is_often) + slices,
        hidden_per_micro_batch=hidden_often,
        hidden_per_step=sum(hidden for _, hidden, is_often in sent if not is_often),
        replica_share=in_step[-1] / sum(in_step) if any(in_step) else 0.0,
        parameters=parameters,
    )


def _unit_seconds(step: StepSetting, parameters: float, tensors: int) -> tuple[float, float, float]:
    """Return the seconds of gathering and reducing so many parameters, and of summing a shard's with replicas'.

    Gradients of small parameters share a bucket, and one that is larger than a bucket is sent alone.
    """
    hardware, widths, zero_stage = step.hardware, step.widths, step.layout.zero_stage
    shards, replicas = step.group(*step.layout.sharding_axes), step.group(*step.layout.replica_axes)
    reduced, latency = parameters * step.config.precision.reduce_bytes, ring_latency(shards, hardware)
    bucket = widths.reduce_bucket_elements  # of a message; 0 where a layer's, or a step's, are one
    reductions = min(tensors, math.ceil(parameters / bucket)) if bucket else 1
    gathers = tensors if zero_stage == 3 and not widths.prefetches_parameters else 1
    reduce_seconds = gather_seconds if zero_stage and not widths.all_reduces_gradients else all_reduce_seconds
    gather = gather_seconds(parameters * widths.gathered, shards, hardware) if zero_stage else 0.0
    return (
        gather + (gathers - 1) * latency,
        reduce_seconds(reduced, shards, hardware) + (reductions - 1) * latency,
        all_reduce_seconds(reduced / shards.ranks, replicas, hardware),
    )
