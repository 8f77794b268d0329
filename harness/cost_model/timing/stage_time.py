"""The seconds of a rank of a pipeline: its layers, its ends, and what tensor, context and data parallelism expose."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.config.hardware import HardwareConfig
from harness.config.schema import RunConfig
from harness.config.stack import StackTiming
from harness.cost_model.flops import recomputed_product_flops
from harness.cost_model.micro_batch_shape import MicroBatchShape, micro_batch_shape
from harness.cost_model.pipeline import split_passes
from harness.cost_model.timing.collectives import (
    RankGroup,
    all_reduce_seconds,
    all_to_all_seconds,
    gather_seconds,
    group_of,
    ring,
)
from harness.cost_model.timing.kernels import LayerSeconds, embedding_seconds, head_seconds, layer_seconds
from harness.layout.layer_spec import layer_branches, numel, projection_flops
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile, trained_share
from harness.layout.partition import Stage, is_expert_weight
from harness.layout.state_widths import StateWidths

# The buckets in which gradients leave backward: the share that is reduced after it has ended.
LAST_BUCKET = 0.05

# What the host of a GPU does to gather or divide a layer, in units of what was counted on a CPU with gloo: on the hosts
# of one H200 and one H100 it was 0.21 and 0.19 for FSDP2, and 0.32 and 0.26 for DeepSpeed's stage 3
# (results/first_gpu/speed.csv: 125m and 350m, less the single process).
GPU_SHARE = 0.25


@dataclass(frozen=True)
class StepSetting:
    """What the time of a step follows from: a configuration as a layout of so many devices of each node."""

    config: RunConfig
    layout: Layout
    hardware: HardwareConfig
    timing: StackTiming
    widths: StateWidths
    gpus_per_node: int

    @cached_property
    def shape(self) -> MicroBatchShape:
        """The sizes of a micro-batch on one rank."""
        return micro_batch_shape(self.config, self.layout, "cpu" if self.hardware.is_cpu else "cuda")

    def group(self, *axes: str) -> RankGroup:
        """Return the ranks along these axes."""
        return group_of(self.layout, axes, self.gpus_per_node)

    @cached_property
    def secondary_group(self) -> RankGroup:
        """The neighboring ranks that share out the parameters which backward gathers."""
        parts = self.layout.secondary_shards
        return RankGroup(parts, -(-parts // self.gpus_per_node))


@dataclass(frozen=True)
class MicroBatchTime:
    """The seconds of a layer or a stage for a micro-batch on one rank."""

    forward: float  # compute alone
    backward: float  # with the second forward of checkpointing
    tp: float  # exposed communication of both passes
    cp: float
    ep: float


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
        sums_each_time = timing.reduces_replicas_every_micro_batch
    else:
        tensors = layers * tensors + len(end_shapes)
        experts = len(own_experts) * layers
        units = _unit_seconds(step, shared, tensors - experts), _unit_seconds(step, layers * of_experts, experts, True)
        gather, again, reduction, replica = (sum(seconds) for seconds in zip(*units, strict=True))
        end_gather = end_again = end_reduction = end_replica = 0.0
        gathers_beside = timing.overlaps_parameter_gather
        reduces_beside = timing.overlaps_gradient_reduction and widths.overlaps_reduction
        hideable, gathered_again, sums_each_time = 1 - LAST_BUCKET, 0, layout.zero_stage == 2
    beside_backward = gathers_beside * gathered_again * again + reduces_beside * hideable * reduction
    hidden_backward = min(beside_backward, passes.backward)
    hidden_with_replicas = min(beside_backward + reduces_beside * hideable * replica, passes.backward)
    hidden_gather = min(gathers_beside * hideable * gather, passes.forward)
    sent = (  # seconds, those of them that are hidden, and whether every micro-batch has them
        (gather + end_gather + end_again, hidden_gather, is_stage_3),
        (gathered_again * again + reduction + end_reduction, hidden_backward, layout.zero_stage >= 2),
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
    reduce_seconds = gather_seconds if zero_stage and not widths.all_reduces_gradients else all_reduce_seconds
    gathered = parameters * (1 if step.config.precision.float8_all_gather and is_layer else widths.gathered)
    again = gather = (gather_seconds(gathered, shards, hardware) if zero_stage else 0.0) + (gathers - 1) * latency
    if step.layout.secondary_shards > 1:
        few = step.secondary_group
        again = gather_seconds(gathered, few, hardware) + (gathers - 1) * ring(few, hardware)[0]
        micro_batches = step.layout.grad_accumulation_steps(step.config.train) if widths.keeps_secondary_shards else 1
        gather = again + (gather - again) / micro_batches
    return (
        gather,
        again,
        reduce_seconds(reduced, shards, hardware) + (reductions - 1) * latency,
        all_reduce_seconds(reduced / shards.ranks, replicas, hardware),
    )


def layer_time(step: StepSetting) -> MicroBatchTime:
    """Return the seconds of a decoder layer.

    Where the host launches kernels more slowly than the device runs them, the host's time counts, and a stack may let
    the device wait for a while in every layer. On a CPU the host runs kernels itself, so that both times count, and
    what it does beside them counts as launches that take as long.
    """
    hardware, timing, shape = step.hardware, step.timing, step.shape
    passes = layer_seconds(shape, hardware, timing)
    recomputed = recomputed_share(step, passes)
    forward, backward = passes.forward, passes.backward + recomputed * passes.forward
    tp, collectives = _tp_seconds(step, passes, recomputed)
    cp = (2 + recomputed) * attention_exchange_seconds(step)
    # Rows go to their experts and come back in each pass; a second forward runs in as many layers as it is of them.
    exchanges = 2 * (2 + (recomputed > 0) / step.config.checkpointing.every) * (shape.ep > 1)
    ep = exchanges * all_to_all_seconds(shape.routed_bytes, step.group("ep"), hardware)
    in_pipeline = step.layout.pp_enabled * timing.pipelined_collective_seconds_per_rank
    of_group = shape.tp * max(in_pipeline, timing.collective_seconds_per_rank)
    of_collectives = 0.0 if hardware.is_cpu else collectives * (timing.collective_launch_seconds + of_group)
    host = _launches(step, recomputed) * hardware.fitted.launch_seconds + of_collectives
    device = forward + backward + tp + cp + ep
    waiting = host if hardware.is_cpu else max(timing.layer_seconds, host - device)
    forward, backward = forward + waiting / 3, backward + waiting * 2 / 3
    return MicroBatchTime(forward, backward, tp, cp, ep)


def attention_exchange_seconds(step: StepSetting) -> float:
    """Return the seconds in which context-parallel ranks exchange what a layer's attention needs, in one pass.

    Keys and values are gathered in each forward, and their gradients scattered. Ranks that exchange heads send queries,
    keys, values and outputs, each by itself.
    """
    shape, group, hardware = step.shape, step.group("cp"), step.hardware
    if not shape.exchanges_heads:
        return gather_seconds(2 * shape.core_key_bytes, group, hardware)
    sent = (shape.query_bytes, shape.core_key_bytes, shape.core_key_bytes, shape.query_bytes)
    return sum(all_to_all_seconds(size, group, hardware) for size in sent)


def _launches(step: StepSetting, recomputed: float) -> float:
    """Return as how many launches counts what the host does in a layer of which backward runs a share again.

    In stage 3 it gathers a layer in forward and in backward, and reduces its gradient. In stages 1 and 2 DeepSpeed
    reduces the gradient of each parameter, once a step and in every micro-batch.
    """
    timing, stage, tensors = step.timing, step.layout.zero_stage, len(model_profile(step.config.model).layer_shapes)
    is_deepspeed, kernels = step.widths.gathers_for_each_use, timing.kernels_per_layer * (1 + recomputed / 3)
    each = tensors * timing.parameter_gather_launches if is_deepspeed else timing.layer_gather_launches
    times = (0.0, 1 / step.layout.grad_accumulation_steps(step.config.train), 1.0, 0.0)[stage] * is_deepspeed
    share, divided = 1.0 if step.hardware.is_cpu else GPU_SHARE, timing.divided_layer_launches * step.layout.tp_enabled
    return kernels + share * (3 * each * (stage == 3) + divided) + times * tensors * timing.parameter_reduce_launches


def recomputed_share(step: StepSetting, passes: LayerSeconds) -> float:
    """Return the share of a layer's forward that backward runs again, on average over the layers.

    torch stops a second forward before the last product, unless dropout follows it or the layer is compiled. A backward
    in two halves runs one for each of them, in all stages but the first: counted are those of the second rank.
    """
    model, checkpointing, is_compiled = step.config.model, step.config.checkpointing, step.config.train.compile
    forward, attention = passes.forward, passes.attention / passes.forward
    if checkpointing.name == "none":
        return 0.0
    if checkpointing.name == "attention":
        return attention
    if checkpointing.name == "selective":  # keeps the results of attention and of all or some matrix products
        products = projection_flops(model, 1)
        again = recomputed_product_flops(model, checkpointing, products, is_compiled)
        saved_share = 1.0 - again / sum(products.values())
        product_share = min(1.0, passes.weight_gradient / forward) * 0.95  # of forward, as many as half of backward's
        return 1.0 - attention - saved_share * product_share
    stops_early, layout = not is_compiled and model.dropout == 0, step.layout
    micro_batches = layout.grad_accumulation_steps(step.config.train)
    halved = sum(split_passes(layout, micro_batches, 1)) / (layout.virtual_stages * micro_batches)
    return (1.0 + halved) * (1.0 - (passes.last_projection / forward if stops_early else 0.0)) / checkpointing.every


def _tp_seconds(step: StepSetting, passes: LayerSeconds, recomputed: float) -> tuple[float, float]:
    """Return the exposed seconds of a layer's tensor-parallel collectives, and how many of them there are.

    Forward has two all-reduces, or with sequence parallelism an all-gather and a reduce-scatter for each, and backward
    as many (arXiv 2205.05198, section 4.2.2). A second forward repeats its own. Backward may gather inputs again, and
    may sum an input's gradient while it computes that of the weight.
    """
    shape, timing = step.shape, step.timing
    if shape.tp == 1:
        return 0.0, 0
    branches = len(layer_branches(shape.model))  # of a layer, before or after each of which there is a collective
    one_way = gather_seconds(shape.whole_hidden_bytes, step.group("tp"), step.hardware)
    collective_seconds, forward_count = (one_way, 2 * branches) if shape.sequence_parallel else (2 * one_way, branches)
    gathered_again = branches * (shape.sequence_parallel and timing.gathers_inputs_again)
    backward_count = forward_count + gathered_again + recomputed * forward_count
    exposed_backward = backward_count * collective_seconds
    if timing.overlaps_input_gradient:
        exposed_backward -= min(branches * collective_seconds, passes.weight_gradient)
    return forward_count * collective_seconds + exposed_backward, forward_count + backward_count
