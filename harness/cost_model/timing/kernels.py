"""The seconds of kernels on one device, one by one and in a layer.

A kernel takes the time of its operations, of its bytes and of its start, one after another: an upper bound of the
roofline (Williams et al. 2009), whose sum in the place of the larger one stands for what a kernel does not overlap. A
matrix product with short sides has fewer operations a byte and so a smaller share of the peak, without a parameter of
its own. Left out are the quantization of tiles to the number of multiprocessors and the clock's dependence on power.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

from harness.config.hardware import HardwareConfig
from harness.config.stack import StackTiming
from harness.cost_model.float8 import RECIPES, cast_bytes
from harness.cost_model.micro_batch_shape import MicroBatchShape
from harness.cost_model.quantized import dequantization_traffic
from harness.hardware.machine import peak_flops
from harness.layout.model_profile import model_profile
from harness.util.text import UserError

# The elements of a head whose products take a fused attention kernel as long as the exponentials and sums of a score:
# FlashAttention-2 (arXiv 2307.08691, figures 4 to 6) is some 15 % slower with heads of 64 than with heads of 128.
SOFTMAX_ELEMENTS = 24

# The share of a PCIe link's bytes that are data: packets of 256 bytes with up to 24 of headers, sequence number and
# checksums (PCI Express Base Specification, transaction and data link layers).
PAYLOAD = 256 / 280

SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 12, 20  # 16-bit reads and writes of a score by attention without a kernel

# Tensors of tokens x hidden_size that elementwise operators of the residual stream read and write in a layer's forward:
# two norms, and two sums.
RESIDUAL_TENSORS = 10
BACKWARD_TENSORS = 2  # times as many in backward
ADAPTER_TENSORS = 5  # of a matrix's output: an adapter's output is scaled and added to it
LIBRARY_TENSORS = (12, 5)  # as Architecture.elementwise_tensors, between those of the project's own families
# Tensors of rows x hidden_size that copies of tokens for experts and sums of their outputs read and write in forward:
# twice as many where ranks that divide the experts sort what they received.
ROUTED_TENSORS = 5
DROPOUT_TENSORS = 6  # of tokens x hidden_size, in forward: two masks and what they multiply

EMBEDDING_TENSORS = 3  # of tokens x hidden_size, in forward and in backward each: rows are read, written, added up


@dataclass(frozen=True)
class KernelRates:
    """What kernels of one device reach: operations and bytes per second, and the time of a kernel without either."""

    matmul_flops: float
    attention_flops: float
    attention_backward_flops: float
    memory_bytes: float  # of kernels that do little more than read and write
    kernel_seconds: float
    cudnn_speedup: float = 1.0  # of cuDNN's attention, in both passes

    def product_seconds(self, m: float, n: float, k: float, width: float, matrices: float = 1) -> float:
        """Return the seconds of the product of an (m, k) with a (k, n) matrix of so many bytes per element.

        One kernel multiplies the rows of several groups with a matrix each.
        """
        return (
            2 * m * n * k / self.matmul_flops
            + width * (m * k + matrices * k * n + m * n) / self.memory_bytes
            + self.kernel_seconds
        )

    def attention_seconds(self, forward_flops: float, *, is_backward: bool, is_cudnn: bool) -> float:
        """Return the seconds of a fused attention kernel whose forward has so many operations.

        Its backward, two kernels, computes 2.5 times as many products, with the scores' own (arXiv 2205.14135).
        """
        speedup = self.cudnn_speedup if is_cudnn else 1.0
        if is_backward:
            return 2.5 * forward_flops / (speedup * self.attention_backward_flops) + 2 * self.kernel_seconds
        return forward_flops / (speedup * self.attention_flops) + self.kernel_seconds


def fused_attention_flops(tokens: float, seq_len: float, heads: float, head_dim: int, computed_share: float) -> float:
    """Return the operations of a fused attention kernel's forward, with those of a score's exponential and sums.

    `computed_share` is that of the scores which are computed, half of them where a causal mask's are skipped.
    """
    return computed_share * 4 * tokens * seq_len * heads * head_dim * (1 + SOFTMAX_ELEMENTS / head_dim)


def host_update_seconds(update_seconds: float, memory_bandwidth: float, host_bandwidth: float) -> float:
    """Return the seconds of an update on the host whose bytes take so long in a device's memory.

    A rank's part of the host's memory bandwidth is taken to be that of its link: a node's memory channels over its
    devices are about as fast as these.
    """
    return update_seconds * memory_bandwidth / host_bandwidth


@lru_cache(maxsize=64)
def rank_hardware(hardware: HardwareConfig, ranks: int) -> HardwareConfig:
    """Return what one of so many ranks of a node has: a share of a CPU's cores and memory, or a device of its own.

    Where ranks are more than cores they take turns, so that what the host does takes them longer.
    """
    if not hardware.is_cpu:
        return hardware
    turns, fitted = max(1.0, ranks / (hardware.cores or ranks)), hardware.fitted
    slower = {"launch_seconds": fitted.launch_seconds * turns, "kernel_seconds": fitted.kernel_seconds * turns}
    return dataclasses.replace(
        hardware,
        memory_bandwidth=hardware.memory_bandwidth / ranks,
        peak_flops=hardware.peak_flops and hardware.peak_flops / ranks,
        fitted=dataclasses.replace(fitted, **slower),
    )


def device_peak_flops(hardware: HardwareConfig, dtype: str) -> float | None:
    """Return the peak FLOP/s of dense products in a dtype by torch's name, None where it is unknown."""
    holds = hardware.peak_flops is not None and hardware.peak_flops_dtype in (None, dtype)
    return hardware.peak_flops if holds else peak_flops(hardware.device_name, dtype)


@lru_cache(maxsize=64)
def kernel_rates(hardware: HardwareConfig, dtype: str) -> KernelRates:
    """Return the rates of a cluster's device with products in a dtype by torch's name.

    Raises UserError if the device's peak is unknown.
    """
    peak = device_peak_flops(hardware, dtype)
    if peak is None:
        raise UserError(
            f"cluster.hardware.device_name={hardware.device_name} has no known peak FLOP/s in {dtype}: set"
            " cluster.hardware.peak_flops"
        )
    fitted = hardware.fitted
    return KernelRates(
        matmul_flops=peak * fitted.matmul_efficiency,
        attention_flops=peak * fitted.attention_efficiency,
        attention_backward_flops=peak * fitted.attention_efficiency * fitted.attention_backward_ratio,
        cudnn_speedup=fitted.cudnn_attention_efficiency / fitted.attention_efficiency,
        memory_bytes=hardware.memory_bandwidth * fitted.memory_efficiency,
        kernel_seconds=fitted.kernel_seconds,
    )


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

    A product takes as long as the one that computes the gradient of its input, or of its weight. The experts of a rank
    are taken to have as many rows as those of all others. Frozen matrices have no gradient themselves.
    """
    rates, tokens, model = kernel_rates(hardware, shape.compute_dtype), shape.tokens, shape.model
    matrices = [
        (each, *each.cut(shape.tp), each.experts / shape.ep or 1) for each in model_profile(model).layer_matrices
    ]
    dtype, width = RECIPES.get(shape.recipe, (shape.compute_dtype, shape.width))
    of_matrices = kernel_rates(hardware, dtype)
    products = [
        of_matrices.product_seconds(tokens * each.uses, rows, columns, width, number)
        for each, rows, columns, number in matrices
    ]
    casts = [cast_bytes(shape, rows, columns) for _, rows, columns, _ in matrices if shape.recipe in RECIPES]
    forward_casts, backward_casts = (sum(sizes) / rates.memory_bytes for sizes in zip((0, 0), *casts, strict=True))
    adapters = [pair for each, *_ in matrices for pair in [*each.products(shape.tp).values()][1:]]
    of_adapters = [rates.product_seconds(tokens, rows, columns, shape.width, 1) for rows, columns in adapters]
    weights, trained = sum(rows * columns * number for _, rows, columns, number in matrices), sum(products)
    if model.adapter.is_enabled:
        weights, trained = sum(map(math.prod, adapters)), sum(of_adapters)
    weight_gradient = trained + _accumulation_seconds(shape, rates, weights)
    both_ways = sum(products) + sum(of_adapters) + dequantization_traffic(shape) / rates.memory_bytes
    forward_attention, backward_attention = attention_seconds(shape, rates, timing)
    # What norms, rotations, sums and activation functions move in forward.
    residual = RESIDUAL_TENSORS + (DROPOUT_TENSORS if model.dropout > 0 else 0)
    is_library, residual_parts = model.hf_info is not None, shape.tp if shape.sequence_parallel else 1
    head_tensors, inner_tensors = LIBRARY_TENSORS if is_library else model.architecture.elementwise_tensors
    elements = model.hidden_size * residual / residual_parts + model.hidden_size * head_tensors / shape.heads_tp
    uses = max(1, model.num_experts_per_tok)
    inner_size = uses * model.intermediate_size + model.shared_expert_intermediate_size
    inner = inner_size * inner_tensors / shape.inner_tp
    elements += ADAPTER_TENSORS * sum(each.outputs for each, *_ in matrices if each.rank)
    moved = tokens * (elements + inner) * shape.width + ROUTED_TENSORS * (2 if shape.ep > 1 else 1) * shape.routed_bytes
    elementwise = moved / rates.memory_bytes * timing.elementwise_traffic
    return LayerSeconds(
        forward=both_ways + forward_attention + elementwise + forward_casts,
        backward=both_ways + weight_gradient + backward_attention + BACKWARD_TENSORS * elementwise + backward_casts,
        weight_gradient=weight_gradient,
        attention=forward_attention,
        last_projection=(products + of_adapters)[-1],
    )


def _accumulation_seconds(shape: MicroBatchShape, rates: KernelRates, elements: float) -> float:
    """Return the seconds in which so many elements of a gradient are added to those of earlier micro-batches."""
    return elements * (shape.width + 2 * shape.accumulate_bytes) / rates.memory_bytes


def attention_seconds(shape: MicroBatchShape, rates: KernelRates, timing: StackTiming) -> tuple[float, float]:
    """Return the seconds of attention's core in forward and in backward.

    Plain operators write and read all scores in device memory, and compute those that the mask hides.
    """
    model, tokens, heads = shape.model, shape.tokens, shape.model.num_attention_heads / shape.heads_tp
    if model.attention == "flash":
        computed_share = 0.5 if timing.skips_masked_scores or shape.key_ranks > 1 else 1.0
        work = fused_attention_flops(tokens, shape.seq_len, heads, model.head_size, computed_share)
        with_cudnn = ("always", "without_cp") if shape.key_ranks == 1 else ("always",)
        is_cudnn = timing.cudnn_attention in with_cudnn
        forward = rates.attention_seconds(work, is_backward=False, is_cudnn=is_cudnn)
        return forward, rates.attention_seconds(work, is_backward=True, is_cudnn=is_cudnn)
    scores = tokens * shape.seq_len * heads * timing.elementwise_traffic
    products = 4 * tokens * shape.seq_len * heads * model.head_size / rates.matmul_flops
    forward = products + scores * SCORE_BYTES_FORWARD / rates.memory_bytes
    return forward, 2 * products + scores * SCORE_BYTES_BACKWARD / rates.memory_bytes


@lru_cache(maxsize=8192)
def head_seconds(shape: MicroBatchShape, hardware: HardwareConfig, timing: StackTiming) -> tuple[float, float]:
    """Return the seconds of final norm, head and loss in forward, and in backward, where a divided loss runs again."""
    rates, width = kernel_rates(hardware, shape.compute_dtype), shape.model.hidden_size
    vocabulary = shape.model.vocab_size / shape.vocabulary_tp
    loss = shape.tokens * vocabulary * timing.logit_bytes / rates.memory_bytes
    product = rates.product_seconds(shape.tokens, vocabulary, width, shape.width)
    is_trained = not shape.model.adapter.is_enabled
    weight_gradient = product + shape.loss_chunks * _accumulation_seconds(shape, rates, vocabulary * width)
    forward = product + loss / 2
    return forward, product + is_trained * weight_gradient + loss / 2 + (shape.loss_chunks > 1) * forward


@lru_cache(maxsize=8192)
def embedding_seconds(shape: MicroBatchShape, hardware: HardwareConfig) -> tuple[float, float]:
    """Return the seconds of the embedding in forward and in backward; its gradient is as large as the table."""
    rates, width = kernel_rates(hardware, shape.compute_dtype), shape.model.hidden_size
    rows = EMBEDDING_TENSORS * shape.tokens * width * shape.width / rates.memory_bytes
    table = shape.model.vocab_size / shape.vocabulary_tp * width
    return rows, (rows + _accumulation_seconds(shape, rates, table)) * (not shape.model.adapter.is_enabled)
