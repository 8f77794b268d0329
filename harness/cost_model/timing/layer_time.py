"""The seconds that one rank's part of a decoder layer, of the embedding and of the head computes for a micro-batch."""

from dataclasses import dataclass
from functools import lru_cache

from harness.config.hardware import HardwareConfig
from harness.config.stack import StackTiming
from harness.cost_model.micro_batch_shape import MicroBatchShape
from harness.cost_model.timing.kernels import (
    SCORE_BYTES_BACKWARD,
    SCORE_BYTES_FORWARD,
    KernelRates,
    fused_attention_flops,
    kernel_rates,
)
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
    rates = kernel_rates(hardware, shape.compute_dtype)
    tokens = shape.tokens
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
    model, heads = shape.model, shape.model.num_attention_heads / shape.tp
    tokens = shape.tokens
    flops = 4 * tokens * shape.seq_len * heads * model.head_dim
    if model.attention == "flash":
        computed_share = 0.5 if timing.skips_masked_scores or shape.cp > 1 else 1.0
        work = fused_attention_flops(tokens, shape.seq_len, heads, model.head_dim, computed_share)
        forward = work / rates.attention_flops + rates.kernel_seconds
        return forward, 2.5 * work / rates.attention_backward_flops + 2 * rates.kernel_seconds
    scores = tokens * shape.seq_len * heads * timing.elementwise_traffic
    products = flops / rates.matmul_flops
    forward = products + rates.elementwise_seconds(scores * SCORE_BYTES_FORWARD)
    return forward, 2 * products + rates.elementwise_seconds(scores * SCORE_BYTES_BACKWARD)


def _elementwise_bytes(shape: MicroBatchShape) -> float:
    """Return the bytes that a layer's norms, rotations, sums and activation functions move in forward."""
    model = shape.model
    tokens = shape.tokens
    residual_parts = shape.tp if shape.sequence_parallel else 1
    residual = RESIDUAL_TENSORS + (DROPOUT_TENSORS if model.dropout > 0 else 0)
    elements = model.hidden_size * residual / residual_parts
    head_tensors, inner_tensors = model_profile(model).elementwise_tensors
    elements += model.hidden_size * head_tensors / shape.tp
    elements += model.intermediate_size * inner_tensors / shape.tp
    return tokens * elements * shape.width


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
    tokens = shape.tokens
    rows = rates.elementwise_seconds(EMBEDDING_TENSORS * tokens * model.hidden_size * shape.width)
    table = model.vocab_size / shape.vocabulary_tp * model.hidden_size
    return PassSeconds(rows, rows + rates.elementwise_seconds(table * accumulated_bytes(shape)))
