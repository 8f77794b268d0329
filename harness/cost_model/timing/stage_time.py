"""The seconds of a pipeline stage for one micro-batch: compute, and what tensor and context parallelism expose."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from harness.config.hardware import HardwareConfig
from harness.config.schema import RunConfig
from harness.config.stack import StackTiming
from harness.cost_model.flops import recomputed_product_flops
from harness.cost_model.micro_batch_shape import MicroBatchShape, micro_batch_shape
from harness.cost_model.timing.kernels import (
    SCORE_BYTES_BACKWARD,
    SCORE_BYTES_FORWARD,
    KernelRates,
    RankGroup,
    all_reduce_seconds,
    fused_attention_flops,
    gather_seconds,
    group_of,
    kernel_rates,
)
from harness.layout.layer_spec import layer_branches, projection_flops
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import StateWidths

# Tensors of tokens x hidden_size that elementwise operators of the residual stream read and write in a layer's forward:
# two norms, and two sums.
RESIDUAL_TENSORS = 10
BACKWARD_TENSORS = 2  # times as many in backward
DROPOUT_TENSORS = 6  # of tokens x hidden_size, in forward: two masks and what they multiply

EMBEDDING_TENSORS = 3  # of tokens x hidden_size, in forward and in backward each: rows are read, written, added up


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


@dataclass(frozen=True)
class LayerSeconds:
    """The seconds of a decoder layer for one micro-batch, and of what is a part of them."""

    forward: float
    backward: float
    weight_gradient: float  # of backward: the gradients of matrices
    attention: float  # of forward: attention's core
    last_projection: float  # of forward: the last matrix product


@lru_cache(maxsize=8192)
def layer_seconds(shape: MicroBatchShape, hardware: HardwareConfig, timing: StackTiming) -> LayerSeconds:
    """Return the seconds of one decoder layer.

    A product takes as long as the one that computes the gradient of its input, or of its weight.
    """
    rates, tokens = kernel_rates(hardware, shape.compute_dtype), shape.tokens
    matrices = [matrix.cut(shape.tp) for matrix in model_profile(shape.model).layer_matrices]
    products = [rates.product_seconds(tokens, rows, columns, shape.width) for rows, columns in matrices]
    weight_gradient = sum(products) + _accumulation_seconds(shape, rates, sum(map(math.prod, matrices)))
    forward_attention, backward_attention = attention_seconds(shape, rates, timing)
    elementwise = rates.elementwise_seconds(_elementwise_bytes(shape)) * timing.elementwise_traffic
    return LayerSeconds(
        forward=sum(products) + forward_attention + elementwise,
        backward=sum(products) + weight_gradient + backward_attention + BACKWARD_TENSORS * elementwise,
        weight_gradient=weight_gradient,
        attention=forward_attention,
        last_projection=products[-1],
    )


def _accumulation_seconds(shape: MicroBatchShape, rates: KernelRates, elements: float) -> float:
    """Return the seconds in which so many elements of a gradient are added to those of earlier micro-batches."""
    return rates.elementwise_seconds(elements * (shape.width + 2 * shape.accumulate_bytes))


def attention_seconds(shape: MicroBatchShape, rates: KernelRates, timing: StackTiming) -> tuple[float, float]:
    """Return the seconds of attention's core in forward and in backward.

    A fused kernel computes 2.5 times as many products in backward, with the scores' own (arXiv 2205.14135). Plain
    operators write and read all scores in device memory, and compute those that the mask hides.
    """
    model, tokens, heads = shape.model, shape.tokens, shape.model.num_attention_heads / shape.tp
    if model.attention == "flash":
        computed_share = 0.5 if timing.skips_masked_scores or shape.cp > 1 else 1.0
        work = fused_attention_flops(tokens, shape.seq_len, heads, model.head_dim, computed_share)
        forward = work / rates.attention_flops + rates.kernel_seconds
        return forward, 2.5 * work / rates.attention_backward_flops + 2 * rates.kernel_seconds
    scores = tokens * shape.seq_len * heads * timing.elementwise_traffic
    products = 4 * tokens * shape.seq_len * heads * model.head_dim / rates.matmul_flops
    forward = products + rates.elementwise_seconds(scores * SCORE_BYTES_FORWARD)
    return forward, 2 * products + rates.elementwise_seconds(scores * SCORE_BYTES_BACKWARD)


def _elementwise_bytes(shape: MicroBatchShape) -> float:
    """Return the bytes that a layer's norms, rotations, sums and activation functions move in forward."""
    model = shape.model
    residual_parts = shape.tp if shape.sequence_parallel else 1
    residual = RESIDUAL_TENSORS + (DROPOUT_TENSORS if model.dropout > 0 else 0)
    head_tensors, inner_tensors = model_profile(model).elementwise_tensors
    elements = model.hidden_size * residual / residual_parts + model.hidden_size * head_tensors / shape.tp
    return shape.tokens * (elements + model.intermediate_size * inner_tensors / shape.tp) * shape.width


@lru_cache(maxsize=8192)
def head_seconds(shape: MicroBatchShape, hardware: HardwareConfig, timing: StackTiming) -> tuple[float, float]:
    """Return the seconds of final norm, head and loss in forward and in backward."""
    rates, width = kernel_rates(hardware, shape.compute_dtype), shape.model.hidden_size
    vocabulary = shape.model.vocab_size / shape.vocabulary_tp
    loss = rates.elementwise_seconds(shape.tokens * vocabulary * timing.logit_bytes)
    product = rates.product_seconds(shape.tokens, vocabulary, width, shape.width)
    return product + loss / 2, 2 * product + _accumulation_seconds(shape, rates, vocabulary * width) + loss / 2


@lru_cache(maxsize=8192)
def embedding_seconds(shape: MicroBatchShape, hardware: HardwareConfig) -> tuple[float, float]:
    """Return the seconds of the embedding in forward and in backward; its gradient is as large as the table."""
    rates, width = kernel_rates(hardware, shape.compute_dtype), shape.model.hidden_size
    rows = rates.elementwise_seconds(EMBEDDING_TENSORS * shape.tokens * width * shape.width)
    table = shape.model.vocab_size / shape.vocabulary_tp * width
    return rows, rows + _accumulation_seconds(shape, rates, table)


class RankStages(NamedTuple):
    """The stages of the ranks at one place of the pipeline."""

    layers: int
    holds_embedding: bool
    holds_head: bool


@dataclass(frozen=True)
class MicroBatchTime:
    """The seconds of a layer or a stage for a micro-batch on one rank."""

    forward: float  # compute alone
    backward: float  # with the second forward of checkpointing
    tp: float  # exposed communication of both passes
    cp: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.forward + self.backward + self.tp + self.cp


def layer_time(step: StepSetting) -> MicroBatchTime:
    """Return the seconds of a decoder layer.

    Where the host launches kernels more slowly than the device runs them, the host's time counts, and a stack may let
    the device wait for a while in every layer. On a CPU the host runs kernels itself, so that both times count, and
    what it does beside them counts as launches that take as long.
    """
    hardware, timing, passes = step.hardware, step.timing, layer_seconds(step.shape, step.hardware, step.timing)
    recomputed = recomputed_share(step, passes)
    forward, backward = passes.forward, passes.backward + recomputed * passes.forward
    tp, collectives = _tp_seconds(step, passes, recomputed)
    cp = _cp_seconds(step, recomputed)
    kernels = timing.kernels_per_layer * (1 + recomputed / 3) + (_further_launches(step) if hardware.is_cpu else 0)
    per_rank = timing.pipelined_collective_seconds_per_rank if step.layout.pp_enabled else 0.0
    per_rank = step.layout.tp * max(per_rank, timing.collective_seconds_per_rank)
    host = kernels * hardware.fitted.launch_seconds + collectives * (timing.collective_launch_seconds + per_rank)
    device = forward + backward + tp + cp
    waiting = host if hardware.is_cpu else max(timing.layer_seconds, host - device)
    forward, backward = forward + waiting / 3, backward + waiting * 2 / 3
    return MicroBatchTime(forward, backward, tp, cp)


def _further_launches(step: StepSetting) -> float:
    """Return as how many launches counts what the host does in a layer beside its kernels."""
    timing, launches = step.timing, float(step.timing.divided_layer_launches if step.layout.tp_enabled else 0)
    if step.layout.zero_stage == 3 and step.layout.shard_count("parameters") > 1:
        of_parameters = len(model_profile(step.config.model).layer_shapes) * timing.parameter_gather_launches
        each = of_parameters if step.widths.gathers_for_each_use else timing.layer_gather_launches
        launches += 3 * each  # gathered in forward and in backward, and its gradient reduced
    return launches


def recomputed_share(step: StepSetting, passes: LayerSeconds) -> float:
    """Return the share of a layer's forward that backward runs again, on average over the layers.

    torch stops a second forward before the last product, unless dropout follows it or the layer is compiled.
    """
    model, checkpointing, is_compiled = step.config.model, step.config.checkpointing, step.config.train.compile
    forward, attention = passes.forward, passes.attention / passes.forward
    if checkpointing.name == "none":
        return 0.0
    if checkpointing.name == "attention":
        return attention
    if checkpointing.name == "selective":  # keeps the results of attention and of all or some matrix products
        again = recomputed_product_flops(model, checkpointing, 1, is_compiled)
        saved_share = 1.0 - again / sum(projection_flops(model, 1).values())
        product_share = min(1.0, passes.weight_gradient / forward) * 0.95  # of forward, as many as half of backward's
        return 1.0 - attention - saved_share * product_share
    stops_early = not is_compiled and model.dropout == 0
    return (1.0 - (passes.last_projection / forward if stops_early else 0.0)) / checkpointing.every


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


def _cp_seconds(step: StepSetting, recomputed: float) -> float:
    """Return the seconds of gathering keys and values, and of scattering their gradients."""
    shape, model = step.shape, step.config.model
    elements = 2 * model.num_key_value_heads * model.head_dim / shape.tp * shape.sequences * shape.seq_len
    return (2 + recomputed) * gather_seconds(elements * shape.width, step.group("cp"), step.hardware)


def stage_time(step: StepSetting, layer: MicroBatchTime, stages: RankStages) -> MicroBatchTime:
    """Return the seconds of a rank's stages of such layers."""
    shape, layers, beside = step.shape, stages.layers, step.timing.micro_batch_seconds
    forward, backward, tp = layers * layer.forward, layers * layer.backward, layers * layer.tp
    vocabulary_group = step.group("tp") if shape.vocabulary_tp > 1 else RankGroup(1, 1)
    ends = [embedding_seconds(shape, step.hardware)] if stages.holds_embedding else []
    ends += [head_seconds(shape, step.hardware, step.timing)] if stages.holds_head else []
    for end_forward, end_backward in ends:
        forward, backward = forward + end_forward, backward + end_backward
        tp += all_reduce_seconds(shape.whole_hidden_bytes, vocabulary_group, step.hardware)
    return MicroBatchTime(forward + beside / 3, backward + beside * 2 / 3, tp, layers * layer.cp)
