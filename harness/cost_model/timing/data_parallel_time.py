"""The exposed seconds of data parallelism: gathering parameters, reducing gradients, and what compute hides of both."""

import math
from dataclasses import dataclass

from harness.cost_model.timing.collectives import all_reduce_seconds, gather_seconds, ring_latency
from harness.cost_model.timing.stage_time import RankStages, StepSetting
from harness.layout.layer_spec import numel
from harness.layout.model_profile import layer_parameter_count, model_profile

# The buckets in which gradients leave backward: the share that is reduced after it has ended.
LAST_BUCKET = 0.05


@dataclass(frozen=True)
class Exposed:
    """The seconds of communication that nothing hides, and those that run beside compute."""

    per_micro_batch: float = 0.0
    per_step: float = 0.0
    hidden_per_micro_batch: float = 0.0
    hidden_per_step: float = 0.0
    replica_share: float = 0.0  # of the exposed seconds, those among replicas


class DataParallelTime:
    """What a rank's stages synchronize with ranks that train on other data, and the seconds that it takes."""

    def __init__(self, step: StepSetting, stages: RankStages) -> None:
        model, layout = step.config.model, step.layout
        profile, parts, self.step, self.stages = model_profile(model), layout.vocabulary_tp, step, stages
        self.shards, self.replicas = step.group(*layout.sharding_axes), step.group(*layout.replica_axes)
        self.layer_tensors = len(profile.layer_shapes)
        self.tensors = stages.layers * self.layer_tensors + stages.holds_embedding + stages.holds_head
        # Parameters on one tensor-parallel rank, before sharding. A tied head counts as well: gradients of both uses
        # are in one table, but in a pipeline each end has its own.
        embedding, head = numel(profile.embedding_shapes) / parts, numel(profile.head_shapes) / parts
        self.end_parameters = embedding * stages.holds_embedding + head * stages.holds_head
        self.layer_parameters = layer_parameter_count(model) / layout.tp
        self.parameters = stages.layers * self.layer_parameters + self.end_parameters

    def expose(self, forward: float, backward: float) -> Exposed:
        """Return the exposed seconds of stages whose passes compute for so many seconds per micro-batch."""
        if self.shards.ranks == 1 and self.replicas.ranks == 1:
            return Exposed()
        expose = self.expose_stage_3 if self.step.layout.zero_stage == 3 else self.expose_lower_stages
        return expose(forward, backward)

    def expose_stage_3(self, forward: float, backward: float) -> Exposed:
        """Return the exposed seconds where parameters are gathered before use, layer by layer (arXiv 2304.11277).

        The first layer's gather, and the last layer's reduction, have nothing to hide behind. Replicas of shards reduce
        what the shards' ranks have of a layer after these have reduced it, in every micro-batch or in the last one.
        """
        timing, widths, layers = self.step.timing, self.step.widths, self.stages.layers
        checkpointing = self.step.config.checkpointing
        gather, reduce, replica = self.layer_seconds(self.layer_parameters)
        root_gather, root_reduce, root_replica = self.layer_seconds(self.end_parameters)
        gathers, reductions, replicas = layers * gather, layers * reduce, layers * replica
        is_recomputed = checkpointing.recomputes_layer(checkpointing.every - 1)
        gathers_again = gathers * (1 + (widths.gathers_for_each_use and is_recomputed))
        prefetches = timing.prefetches_parameters and widths.prefetches_parameters
        overlaps = timing.prefetches_parameters and widths.overlaps_reduction  # both need a stream of their own
        beside = prefetches * gathers_again + overlaps * reductions
        last = overlaps * reduce
        waited_for = _beside(gathers, gather, forward) if prefetches else gathers
        waited_for += gathers_again + reductions - beside
        alone = waited_for + _beside(beside, last, backward)
        beside_replicas = waited_for + _beside(beside + replicas, last + replica, backward)
        together = beside_replicas if overlaps else alone + replicas
        added = together - alone + root_replica
        alone_and_root = alone + 2 * root_gather + root_reduce
        hidden, hidden_added = gathers + gathers_again + reductions - alone, replicas - (together - alone)
        is_added_each_time = timing.reduces_replicas_every_micro_batch
        micro_batches = self.step.layout.grad_accumulation_steps(self.step.config.train)
        added_in_step = added * (micro_batches if is_added_each_time else 1)
        total = alone_and_root * micro_batches + added_in_step
        share = added_in_step / total if total else 0.0
        if is_added_each_time:
            return Exposed(alone_and_root + added, 0.0, hidden + hidden_added, 0.0, share)
        return Exposed(alone_and_root, added, hidden, hidden_added, share)

    def layer_seconds(self, parameters: float) -> tuple[float, float, float]:
        """Return the seconds of gathering and reducing so many parameters, and of summing a shard's with replicas'."""
        hardware, widths = self.step.hardware, self.step.widths
        reduced = parameters * self.step.config.precision.reduce_bytes
        # Messages beyond one for the layer as a whole.
        gathers = 0 if widths.prefetches_parameters else self.layer_tensors - 1
        further, latency = self.further_messages(parameters, self.layer_tensors), ring_latency(self.shards, hardware)
        return (
            gather_seconds(parameters * widths.gathered, self.shards, hardware) + gathers * latency,
            gather_seconds(reduced, self.shards, hardware) + further * latency,
            all_reduce_seconds(reduced / self.shards.ranks, self.replicas, hardware),
        )

    def expose_lower_stages(self, forward: float, backward: float) -> Exposed:
        """Return the exposed seconds where each rank has all parameters.

        Stages 0 and 1 reduce once, beside the backward of the last micro-batch, stage 2 in every micro-batch; stages 1
        and 2 gather the updated parameters.
        """
        hardware, timing, widths = self.step.hardware, self.step.timing, self.step.widths
        zero_stage, gradient_bytes = (
            self.step.layout.zero_stage,
            self.parameters * self.step.config.precision.reduce_bytes,
        )
        reduce_seconds = gather_seconds if zero_stage and not widths.all_reduces_gradients else all_reduce_seconds
        reduction = reduce_seconds(gradient_bytes, self.shards, hardware)
        reduction += self.further_messages(self.parameters, self.tensors) * ring_latency(self.shards, hardware)
        replica = all_reduce_seconds(gradient_bytes / self.shards.ranks, self.replicas, hardware)
        gather = gather_seconds(self.parameters * widths.gathered, self.shards, hardware) if zero_stage else 0.0
        reduction += replica
        overlaps = timing.overlaps_gradient_reduction and widths.overlaps_reduction
        exposed = _after(reduction, backward if overlaps else 0.0)
        exposed_gather = _after(gather, forward if timing.overlaps_parameter_gather else 0.0)
        hidden, hidden_gather = reduction - exposed, gather - exposed_gather
        exposed_gather += timing.shard_slice_seconds * self.shards.ranks * self.tensors if zero_stage else 0.0
        replica_share = replica / (reduction + gather) if reduction + gather else 0.0
        if zero_stage == 2:
            return Exposed(exposed, exposed_gather, hidden, hidden_gather, replica_share)
        return Exposed(0.0, exposed + exposed_gather, 0.0, hidden + hidden_gather, replica_share)

    def further_messages(self, parameters: float, tensors: int) -> int:
        """Return in how many messages beyond the first these gradients are sent.

        Those of small parameters share a bucket, and one that is larger than a bucket is sent alone.
        """
        bucket = self.step.widths.reduce_bucket_elements  # of a message; 0 where a layer's, or a step's, are one
        return min(tensors, math.ceil(parameters / bucket)) - 1 if bucket else 0


def _beside(sent: float, alone: float, compute: float) -> float:
    """Return the exposed seconds of collectives beside compute, of which one at an end runs alone."""
    return min(sent, max(0.0, sent - alone - compute) + alone)


def _after(sent: float, compute: float) -> float:
    """Return the exposed seconds of buckets beside compute, the last of which is sent when that has ended."""
    return max(sent - compute, LAST_BUCKET * sent)
