"""The exposed seconds of data parallelism: gathering parameters, reducing gradients, and what compute hides of both."""

from dataclasses import dataclass
from typing import NamedTuple

from harness.config.hardware import HardwareConfig
from harness.config.stack_timing import StackTiming
from harness.cost_model.timing.collectives import Group, all_reduce_seconds, gather_seconds

# The buckets in which gradients leave backward: the share that is reduced after it has ended.
LAST_BUCKET = 0.05


class ShardedState(NamedTuple):
    """What a rank's stage synchronizes, and with whom."""

    layers: int
    layer_parameters: float  # on one tensor-parallel rank, before sharding
    other_parameters: float  # of embedding and head
    zero_stage: int
    shards: Group
    replicas: Group
    gathered_bytes: int  # per element of a gathered parameter
    reduced_bytes: int  # per element of a sent gradient
    gathers: int  # of each parameter for a micro-batch, in stage 3
    micro_batches: int

    @property
    def parameters(self) -> float:
        """All parameters of the stage."""
        return self.layers * self.layer_parameters + self.other_parameters


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
    what the shards' ranks have, in every micro-batch or once a step.
    """
    gather = gather_seconds(state.layer_parameters * state.gathered_bytes, state.shards, hardware)
    reduce = gather_seconds(state.layer_parameters * state.reduced_bytes, state.shards, hardware)
    root = 2 * gather_seconds(state.other_parameters * state.gathered_bytes, state.shards, hardware)
    root_reduce = gather_seconds(state.other_parameters * state.reduced_bytes, state.shards, hardware)
    shard_bytes = state.parameters * state.reduced_bytes / state.shards.ranks
    replica = all_reduce_seconds(shard_bytes, state.replicas, hardware)
    every_micro_batch = replica if timing.reduces_replicas_every_micro_batch else 0.0
    forward_gathers = state.layers * gather
    backward_sends = state.layers * ((state.gathers - 1) * gather + reduce) + every_micro_batch
    if timing.prefetches_parameters:
        exposed = max(0.0, forward_gathers - gather - forward) + max(0.0, backward_sends - reduce - backward)
        exposed += gather + reduce
    else:
        exposed = forward_gathers + backward_sends
    sent = forward_gathers + backward_sends
    exposed = min(exposed, sent)
    once = 0.0 if timing.reduces_replicas_every_micro_batch else replica
    total = (exposed + root + root_reduce) * state.micro_batches + once
    share = (every_micro_batch * exposed / sent * state.micro_batches + once) / total if total else 0.0
    return Exposed(exposed + root + root_reduce, once, sent - exposed, 0.0, share)


def _expose_lower_stages(
    state: ShardedState, hardware: HardwareConfig, timing: StackTiming, forward: float, backward: float
) -> Exposed:
    """Return the exposed seconds where each rank has all parameters.

    Stages 0 and 1 reduce once, beside the backward of the last micro-batch, stage 2 in every micro-batch; stages 1 and
    2 gather the updated parameters.
    """
    gradient_bytes = state.parameters * state.reduced_bytes
    if state.zero_stage == 0:
        group = state.replicas if state.replicas.ranks > 1 else state.shards
        reduction = all_reduce_seconds(gradient_bytes, group, hardware)
        replica, gather = (reduction if state.replicas.ranks > 1 else 0.0), 0.0
    else:
        reduction = gather_seconds(gradient_bytes, state.shards, hardware)
        replica = all_reduce_seconds(gradient_bytes / state.shards.ranks, state.replicas, hardware)
        gather = gather_seconds(state.parameters * state.gathered_bytes, state.shards, hardware)
        reduction += replica
    window = backward if timing.overlaps_gradient_reduction else 0.0
    exposed = max(reduction - window, LAST_BUCKET * reduction)
    hidden = reduction - exposed
    exposed_gather = max(gather - forward, LAST_BUCKET * gather) if timing.overlaps_parameter_gather else gather
    hidden_gather = gather - exposed_gather
    replica_share = replica / (reduction + gather) if reduction + gather else 0.0
    if state.zero_stage == 2:
        return Exposed(exposed, exposed_gather, hidden, hidden_gather, replica_share)
    return Exposed(0.0, exposed + exposed_gather, 0.0, hidden + hidden_gather, replica_share)
