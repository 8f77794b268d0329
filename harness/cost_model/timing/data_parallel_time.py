"""The exposed seconds of data parallelism: gathering parameters, reducing gradients, and what compute hides of both."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from harness.config.hardware import HardwareConfig
from harness.config.stack import StackTiming
from harness.cost_model.timing.collectives import RankGroup, all_reduce_seconds, gather_seconds, ring_latency
from harness.layout.state_widths import StateWidths

# The buckets in which gradients leave backward: the share that is reduced after it has ended.
LAST_BUCKET = 0.05


class ShardedState(NamedTuple):
    """What a rank's stage synchronizes, and with whom."""

    layers: int
    layer_parameters: float  # on one tensor-parallel rank, before sharding
    other_parameters: float  # of embedding and head
    zero_stage: int
    shards: RankGroup
    replicas: RankGroup
    widths: StateWidths
    reduced_bytes: int  # per element of a sent gradient
    gathers: int  # of each parameter for a micro-batch, in stage 3
    micro_batches: int
    layer_tensors: int  # parameters of a layer
    tensors: int  # all parameters, each counted once

    @property
    def parameters(self) -> float:
        """All parameters of the stage."""
        return self.layers * self.layer_parameters + self.other_parameters

    def further_messages(self, parameters: float, tensors: int) -> int:
        """Return in how many messages beyond the first these gradients are sent.

        Those of small parameters share a bucket, and one that is larger than a bucket is sent alone.
        """
        bucket = self.widths.reduce_bucket_elements  # of a message; 0 where a layer's, or a step's, are one
        return min(tensors, math.ceil(parameters / bucket)) - 1 if bucket else 0


@dataclass(frozen=True)
class Exposed:
    """The seconds of communication that nothing hides, and those that run beside compute."""

    per_micro_batch: float = 0.0
    per_step: float = 0.0
    hidden_per_micro_batch: float = 0.0
    hidden_per_step: float = 0.0
    replica_share: float = 0.0  # of the exposed seconds, those among replicas


def expose(
    state: ShardedState, hardware: HardwareConfig, timing: StackTiming, forward: float, backward: float
) -> Exposed:
    """Return the exposed seconds of a stage whose passes compute for so many seconds per micro-batch."""
    if state.shards.ranks == 1 and state.replicas.ranks == 1:
        return Exposed()
    if state.zero_stage == 3:
        return _expose_stage_3(state, hardware, timing, forward, backward)
    return _expose_lower_stages(state, hardware, timing, forward, backward)


def _expose_stage_3(
    state: ShardedState, hardware: HardwareConfig, timing: StackTiming, forward: float, backward: float
) -> Exposed:
    """Return the exposed seconds where parameters are gathered before use, layer by layer (arXiv 2304.11277).

    The first layer's gather, and the last layer's reduction, have nothing to hide behind. Replicas of shards reduce
    what the shards' ranks have of a layer after these have reduced it, in every micro-batch or in the last one.
    """
    sent = _layer_seconds(state.layer_parameters, state, hardware)
    root = _layer_seconds(state.other_parameters, state, hardware)
    gathers, replicas = state.layers * sent.gather, state.layers * sent.replica
    gathers_again, reductions = (state.gathers - 1) * gathers, state.layers * sent.reduce
    prefetches = timing.prefetches_parameters and state.widths.prefetches_parameters
    overlaps = timing.prefetches_parameters and state.widths.overlaps_reduction  # both need a stream of their own
    beside = prefetches * gathers_again + overlaps * reductions
    last = overlaps * sent.reduce
    waited_for = _beside(gathers, sent.gather, forward) if prefetches else gathers
    waited_for += gathers_again + reductions - beside
    alone = waited_for + _beside(beside, last, backward)
    together = alone + replicas
    if overlaps:
        together = waited_for + _beside(beside + replicas, last + sent.replica, backward)
    added = together - alone + root.replica
    alone_and_root = alone + 2 * root.gather + root.reduce
    hidden, hidden_added = gathers + gathers_again + reductions - alone, replicas - (together - alone)
    times = state.micro_batches if timing.reduces_replicas_every_micro_batch else 1
    total = alone_and_root * state.micro_batches + added * times
    share = added * times / total if total else 0.0
    if timing.reduces_replicas_every_micro_batch:
        return Exposed(alone_and_root + added, 0.0, hidden + hidden_added, 0.0, share)
    return Exposed(alone_and_root, added, hidden, hidden_added, share)


class LayerSeconds(NamedTuple):
    """The seconds of a layer's collectives in stage 3."""

    gather: float
    reduce: float
    replica: float


def _layer_seconds(parameters: float, state: ShardedState, hardware: HardwareConfig) -> LayerSeconds:
    """Return the seconds of gathering and reducing so many parameters, and of summing a shard's with the replicas'."""
    reduced, latency = parameters * state.reduced_bytes, ring_latency(state.shards, hardware)
    # Messages beyond one for the layer as a whole.
    gathers = 0 if state.widths.prefetches_parameters else state.layer_tensors - 1
    further = state.further_messages(parameters, state.layer_tensors)
    return LayerSeconds(
        gather_seconds(parameters * state.widths.gathered, state.shards, hardware) + gathers * latency,
        gather_seconds(reduced, state.shards, hardware) + further * latency,
        all_reduce_seconds(reduced / state.shards.ranks, state.replicas, hardware),
    )


def _beside(sent: float, alone: float, compute: float) -> float:
    """Return the exposed seconds of collectives beside compute, of which one at an end runs alone."""
    return min(sent, max(0.0, sent - alone - compute) + alone)


def _expose_lower_stages(
    state: ShardedState, hardware: HardwareConfig, timing: StackTiming, forward: float, backward: float
) -> Exposed:
    """Return the exposed seconds where each rank has all parameters.

    Stages 0 and 1 reduce once, beside the backward of the last micro-batch, stage 2 in every micro-batch; stages 1 and
    2 gather the updated parameters.
    """
    gradient_bytes, has_replicas = state.parameters * state.reduced_bytes, state.replicas.ranks > 1
    if state.zero_stage == 0:
        reduction = all_reduce_seconds(gradient_bytes, state.replicas if has_replicas else state.shards, hardware)
        replica, gather = reduction * has_replicas, 0.0
    else:
        reduce_seconds = all_reduce_seconds if state.widths.all_reduces_gradients else gather_seconds
        reduction = reduce_seconds(gradient_bytes, state.shards, hardware)
        reduction += state.further_messages(state.parameters, state.tensors) * ring_latency(state.shards, hardware)
        replica = all_reduce_seconds(gradient_bytes / state.shards.ranks, state.replicas, hardware)
        gather = gather_seconds(state.parameters * state.widths.gathered, state.shards, hardware)
        reduction += replica
    overlaps = timing.overlaps_gradient_reduction and state.widths.overlaps_reduction
    exposed = _after(reduction, backward if overlaps else 0.0)
    exposed_gather = _after(gather, forward if timing.overlaps_parameter_gather else 0.0)
    hidden, hidden_gather = reduction - exposed, gather - exposed_gather
    exposed_gather += timing.shard_slice_seconds * state.shards.ranks * state.tensors if state.zero_stage else 0.0
    replica_share = replica / (reduction + gather) if reduction + gather else 0.0
    if state.zero_stage == 2:
        return Exposed(exposed, exposed_gather, hidden, hidden_gather, replica_share)
    return Exposed(0.0, exposed + exposed_gather, 0.0, hidden + hidden_gather, replica_share)


def _after(sent: float, compute: float) -> float:
    """Return the exposed seconds of buckets beside compute, the last of which is sent when that has ended."""
    return max(sent - compute, LAST_BUCKET * sent)
