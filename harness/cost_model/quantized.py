"""The bytes of frozen matrices in NF4, as the library bitsandbytes stores and multiplies them. No torch.

QLoRA (arXiv 2305.14314, section 3) stores two weights in a byte. A block of 64 weights has a scale in fp32. Double
quantization stores a scale in a byte, and has an fp32 scale for 256 of them. Quantized are the matrices of layers:
transformers leaves embedding, head, norms and biases as they are. Each pass makes a matrix whole in the width of
compute, and multiplies it. Each matrix has its own tables of the values that codes stand for.
"""

from collections.abc import Sequence

from harness.config.adapter import NF4_BYTES
from harness.config.model import ModelConfig
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape
from harness.layout.layer_spec import layer_matrices
from harness.layout.partition import Stage

BLOCK, BLOCK_OF_SCALES = 64, 256
TABLE, TABLE_OF_SCALES = 2**4, 2**8 + 1  # in values; the second one has the mean of scales, too


def scale_bytes(elements: int, double_quant: bool) -> int:
    """Return the bytes of the scales of a matrix with so many elements, and of its tables."""
    blocks = -(-elements // BLOCK)
    if not double_quant:
        return FP32_BYTES * (blocks + TABLE)
    return blocks + FP32_BYTES * (-(-blocks // BLOCK_OF_SCALES) + TABLE + TABLE_OF_SCALES)


def quantized_base(model: ModelConfig, stages: Sequence[Stage]) -> tuple[int, int]:
    """Return the elements of the quantized matrices of some stages, and the bytes of their scales."""
    layers = sum(stage.layers for stage in stages) * model.adapter.is_quantized
    sizes = [matrix.elements for matrix in layer_matrices(model)] if layers else []
    return layers * sum(sizes), layers * sum(scale_bytes(size, model.adapter.double_quant) for size in sizes)


def whole_matrix_bytes(shape: MicroBatchShape, elements: int) -> int:
    """Return the bytes of a matrix that is made whole for a product; 0 where it always is."""
    return elements * shape.width * shape.model.adapter.is_quantized


def whole_in_forward_bytes(shape: MicroBatchShape, elements: int) -> int:
    """Return the bytes of such a matrix in a forward, which has its doubly quantized scales in fp32 beside it."""
    scales = FP32_BYTES * -(-elements // BLOCK) * shape.model.adapter.double_quant
    return whole_matrix_bytes(shape, elements) + scales * shape.model.adapter.is_quantized


def dequantization_traffic(shape: MicroBatchShape) -> float:
    """Return the bytes that a pass through a layer moves to make its matrices whole: those it reads and writes."""
    elements, scales = quantized_base(shape.model, [Stage(0, 1, 0, 1)])
    return elements * (NF4_BYTES + shape.width) + scales
