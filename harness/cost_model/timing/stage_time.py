"""The seconds of a pipeline stage for one micro-batch: compute, and what tensor and context parallelism expose."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from harness.config.hardware import HardwareConfig
from harness.config.schema import CheckpointingConfig
from harness.config.stack import StackTiming
from harness.cost_model.flops import recomputed_product_flops
from harness.cost_model.micro_batch_shape import MicroBatchShape
from harness.cost_model.timing.collectives import RankGroup, all_reduce_seconds, gather_seconds
from harness.cost_model.timing.kernels import (
    SCORE_BYTES_BACKWARD,
    SCORE_BYTES_FORWARD,
    KernelRates,
    fused_attention_flops,
    kernel_rates,
)
from harness.layout.layer_spec import layer_branches, projection_flops
from harness.layout.model_profile import model_profile

# Tensors of tokens x hidden_size that elementwise operators of the residual stream read and write in a layer's forward:
# two norms, and two sums.
RESIDUAL_TENSORS = 10
BACKWARD_TENSORS = 2  # times as many in backward
DROPOUT_TENSORS = 6  # of tokens x hidden_size, in forward: two masks and what they multiply

EMBEDDING_TENSORS = 3  # of tokens x hidden_size, in forward and in backward each: rows are read, written, added up


@dataclass(frozen=True)
class PassSeconds:
    """The seconds of forward and backward of a part of the model for one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0
    weight_gradient: float = 0.0  # the part of backward that computes gradients of matrices
    attention: float = 0.0  # the part of forward that is attention's core
    last_projection: float = 0.0  # the part of forward that is the layer's last matrix product


@lru_cache(maxsize=8192)
def layer_seconds(shape: MicroBatchShape, hardware: HardwareConfig, timing: StackTiming) -> PassSeconds:
    """Return the seconds of one decoder layer."""
    rates, tokens = kernel_rates(hardware, shape.compute_dtype), shape.tokens
    products = input_gradients = weight_gradients = last = 0.0
    for matrix in model_profile(shape.model).layer_matrices:
        rows, columns = matrix.cut(shape.tp)
        last = rates.product_seconds(tokens, rows, columns, shape.width)
        products += last
        input_gradients += rates.product_seconds(tokens, columns, rows, shape.width)
        weight_gradients += rates.product_seconds(rows, columns, tokens, shape.width)
        weight_gradients += rates.elementwise_seconds(rows * columns * accumulated_bytes(shape))
    forward_attention, backward_attention = attention_seconds(shape, rates, timing)
    elementwise = rates.elementwise_seconds(_elementwise_bytes(shape)) * timing.elementwise_traffic
    return PassSeconds(
        forward=products + forward_attention + elementwise,
        backward=input_gradients + weight_gradients + backward_attention + BACKWARD_TENSORS * elementwise,
        weight_gradient=weight_gradients,
        attention=forward_attention,
        last_projection=last,
    )


def accumulated_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes by which a gradient's element is added to those of earlier micro-batches."""
    return shape.width + 2 * shape.accumulate_bytes


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
def head_seconds(shape: MicroBatchShape, hardware: HardwareConfig, timing: StackTiming) -> PassSeconds:
    """Return the seconds of final norm, head and loss."""
    rates, model = kernel_rates(hardware, shape.compute_dtype), shape.model
    tokens, vocabulary = shape.tokens, model.vocab_size / shape.vocabulary_tp
    loss = rates.elementwise_seconds(tokens * vocabulary * timing.logit_bytes)
    forward = rates.product_seconds(tokens, vocabulary, model.hidden_size, shape.width)
    weight_gradient = rates.product_seconds(vocabulary, model.hidden_size, tokens, shape.width)
    weight_gradient += rates.elementwise_seconds(vocabulary * model.hidden_size * accumulated_bytes(shape))
    return PassSeconds(
        forward=forward + loss / 2,
        backward=forward + weight_gradient + loss / 2,
        weight_gradient=weight_gradient,
    )


@lru_cache(maxsize=8192)
def embedding_seconds(shape: MicroBatchShape, hardware: HardwareConfig) -> PassSeconds:
    """Return the seconds of the embedding, whose gradient is as large as the table."""
    rates, model = kernel_rates(hardware, shape.compute_dtype), shape.model
    rows = rates.elementwise_seconds(EMBEDDING_TENSORS * shape.tokens * model.hidden_size * shape.width)
    table = model.vocab_size / shape.vocabulary_tp * model.hidden_size
    return PassSeconds(rows, rows + rates.elementwise_seconds(table * accumulated_bytes(shape)))


class StageContext(NamedTuple):
    """What decides a stage's seconds for a micro-batch, beside the number of its layers."""

    shape: MicroBatchShape
    checkpointing: CheckpointingConfig
    tp_group: RankGroup
    cp_group: RankGroup
    is_pipelined: bool
    is_compiled: bool
    layer_launches: float  # of the host in a layer, beside its kernels, on a CPU


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
    def compute(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@lru_cache(maxsize=16384)
def layer_time(context: StageContext, hardware: HardwareConfig, timing: StackTiming) -> MicroBatchTime:
    """Return the seconds of a decoder layer.

    Where the host launches kernels more slowly than the device runs them, the host's time counts, and a stack may let
    the device wait for a while in every layer. On a CPU the host runs kernels itself, so that both times count.
    """
    passes = layer_seconds(context.shape, hardware, timing)
    recomputed = recomputed_share(context, passes)
    forward, backward = passes.forward, passes.backward + recomputed * passes.forward
    tp, collectives = _tp_seconds(context, hardware, timing, passes, recomputed)
    cp = _cp_seconds(context, hardware, recomputed)
    kernels = timing.kernels_per_layer * (1 + recomputed / 3) + (context.layer_launches if hardware.is_cpu else 0)
    per_rank = timing.pipelined_collective_seconds_per_rank if context.is_pipelined else 0.0
    per_rank = context.tp_group.ranks * max(per_rank, timing.collective_seconds_per_rank)
    host = kernels * hardware.fitted.launch_seconds + collectives * (timing.collective_launch_seconds + per_rank)
    device = forward + backward + tp + cp
    waiting = host if hardware.is_cpu else max(timing.layer_seconds, host - device)
    forward, backward = forward + waiting / 3, backward + waiting * 2 / 3
    return MicroBatchTime(forward, backward, tp, cp)


def recomputed_share(context: StageContext, passes: PassSeconds) -> float:
    """Return the share of a layer's forward that backward runs again, on average over the layers.

    torch stops a second forward before the last product, unless dropout follows it or the layer is compiled.
    """
    name, forward = context.checkpointing.name, passes.forward
    if name == "none":
        return 0.0
    if name == "attention":
        return passes.attention / forward
    if name == "selective":  # keeps the results of attention and of all matrix products, or of some of them
        model = context.shape.model
        again = recomputed_product_flops(model, context.checkpointing, 1, context.is_compiled)
        saved_share = 1.0 - again / sum(projection_flops(model, 1).values())
        product_share = min(1.0, passes.weight_gradient / forward) * 0.95  # of forward, as many as half of backward's
        return 1.0 - passes.attention / forward - saved_share * product_share
    stops_early = not context.is_compiled and context.shape.model.dropout == 0
    share = 1.0 - (passes.last_projection / forward if stops_early else 0.0)
    return share / context.checkpointing.every


def _tp_seconds(
    context: StageContext, hardware: HardwareConfig, timing: StackTiming, passes: PassSeconds, recomputed: float
) -> tuple[float, float]:
    """Return the exposed seconds of a layer's tensor-parallel collectives, and how many of them there are.

    Forward has two all-reduces, or with sequence parallelism an all-gather and a reduce-scatter for each, and backward
    as many (arXiv 2205.05198, section 4.2.2). A second forward repeats its own. Backward may gather inputs again, and
    may sum an input's gradient while it computes that of the weight.
    """
    shape, group = context.shape, context.tp_group
    if group.ranks == 1:
        return 0.0, 0
    branches = len(layer_branches(shape.model))  # of a layer, before or after each of which there is a collective
    one_way = gather_seconds(shape.whole_hidden_bytes, group, hardware)
    collective_seconds, forward_count = (one_way, 2 * branches) if shape.sequence_parallel else (2 * one_way, branches)
    gathered_again = branches * (shape.sequence_parallel and timing.gathers_inputs_again)
    backward_count = forward_count + gathered_again + recomputed * forward_count
    exposed_backward = backward_count * collective_seconds
    if timing.overlaps_input_gradient:
        exposed_backward -= min(branches * collective_seconds, passes.weight_gradient)
    return forward_count * collective_seconds + exposed_backward, forward_count + backward_count


def _cp_seconds(context: StageContext, hardware: HardwareConfig, recomputed: float) -> float:
    """Return the seconds of gathering keys and values, and of scattering their gradients."""
    shape, model = context.shape, context.shape.model
    elements = 2 * model.num_key_value_heads * model.head_dim / shape.tp * shape.sequences * shape.seq_len
    return (2 + recomputed) * gather_seconds(elements * shape.width, context.cp_group, hardware)


@lru_cache(maxsize=16384)
def stage_time(
    context: StageContext, hardware: HardwareConfig, timing: StackTiming, stages: RankStages
) -> MicroBatchTime:
    """Return the seconds of a rank's stages."""
    shape, layer, layers = context.shape, layer_time(context, hardware, timing), stages.layers
    forward, backward, tp = layers * layer.forward, layers * layer.backward, layers * layer.tp
    vocabulary_group = context.tp_group if shape.vocabulary_tp > 1 else RankGroup(1, 1)
    ends = [embedding_seconds(shape, hardware)] if stages.holds_embedding else []
    ends += [head_seconds(shape, hardware, timing)] if stages.holds_head else []
    for passes in ends:
        forward, backward = forward + passes.forward, backward + passes.backward
        tp += all_reduce_seconds(shape.whole_hidden_bytes, vocabulary_group, hardware)
    forward, backward = forward + timing.micro_batch_seconds / 3, backward + timing.micro_batch_seconds * 2 / 3
    return MicroBatchTime(forward, backward, tp, layers * layer.cp)
