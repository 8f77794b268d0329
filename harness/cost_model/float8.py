"""The seconds and the temporary tensors of projections that multiply scaled copies of their matrices. No torch.

torchao casts both operands of each product where it runs: in forward input and weight, in backward the output's
gradient and the weight, and again the gradient and the input (torchao/float8/float8_linear.py). Only the operands
that forward had are kept. Attention, norms, embedding and head stay in 16 bits.
"""

from collections.abc import Iterator

from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape
from harness.layout.layer_spec import layer_matrices

FP64_BYTES = 8

# By recipe, the name of a device's rate (harness/config/devices.toml) and the bytes of an element and its scales.
RECIPES = {
    "tensorwise": ("float8_e4m3fn", 1.0),
    "rowwise": ("float8_e4m3fn", 1.0),
    "mxfp8": ("mxfp8", 1 + 1 / 32),
    "nvfp4": ("nvfp4", 1 / 2 + 1 / 16),
}

# Bytes that are moved for each element of a 16-bit matrix which is cast: by magnitude, maximum, copy in fp32, product
# with the scale, clamp and copy in float8, one after another; and where a compiler fuses them with the reductions.
CAST_BYTES, COMPILED_CAST_BYTES = 33, 5


def operands_of(shape: MicroBatchShape, outputs: float, inputs: float) -> tuple[float, float, float]:
    """Return the elements of a projection's input, weight and output."""
    return shape.tokens * inputs, inputs * outputs, shape.tokens * outputs


def cast_bytes(shape: MicroBatchShape, outputs: float, inputs: float) -> tuple[float, float]:
    """Return the bytes that the casts of a projection move in forward and in backward."""
    entering, weight, leaving = operands_of(shape, outputs, inputs)
    each, weight = COMPILED_CAST_BYTES if shape.is_compiled else CAST_BYTES, weight * shape.casts_weights
    return each * (entering + weight), each * (2 * leaving + weight + entering)


def product_temporaries(shape: MicroBatchShape, left: float, right: float, result: float, copied: float) -> float:
    """Return the most bytes beside both float8 operands while they are multiplied, of so many elements each.

    A kernel of a device makes its result of operands that lie row by column, which some are copied for. An emulation
    widens both to fp32 and divides by their scales.
    """
    if shape.device == "cpu":
        emulated = max(2 * left, left + 2 * right, left + right + result, 1.5 * result)
        return copied + FP32_BYTES * emulated
    scales = FP32_BYTES * result if shape.recipe == "rowwise" and copied else 0.0  # multiplied behind the product
    return copied + shape.width * result + scales


def backward_temporaries(shape: MicroBatchShape, outputs: float, inputs: float) -> Iterator[float]:
    """Yield the most bytes of temporary tensors before a projection's input has its gradient, and beside that.

    A cast has the matrix in fp32 twice beside its float8 values.
    """
    entering, weight, leaving = operands_of(shape, outputs, inputs)
    cast, first = 1 + 2 * FP32_BYTES, product_temporaries(shape, leaving, weight, entering, weight)
    own = weight * shape.casts_weights  # else it was gathered in float8
    yield max(cast * leaving, leaving + cast * own, leaving + own + first)
    second = product_temporaries(shape, leaving, entering, weight, leaving + entering)
    beside = leaving + own + shape.width * entering
    yield beside + max(cast * leaving, leaving + cast * entering, leaving + entering + second)


def amax_bytes(shape: MicroBatchShape, layers: int, recomputed: float) -> float:
    """Return the bytes of the largest magnitudes of rows that tensor-parallel ranks agree on in a micro-batch.

    A row-parallel product's rows are divided in forward, and a column-parallel one's in backward, of activations and of
    weights alike. torchao reduces them in fp64. Those of whole matrices are scalars, which no formula has. Compiled
    code computes some of weights once more instead of keeping them.
    """
    if shape.recipe != "rowwise":
        return 0.0
    rows, columns = (
        [each for each in layer_matrices(shape.model) if each.style == style] for style in ("row", "column")
    )
    of_rows, of_columns = sum(each.outputs for each in rows), sum(each.inputs for each in columns)
    forward, backward = shape.tokens * len(rows) + of_rows, shape.tokens * len(columns) + of_columns
    again = (layers * of_rows + recomputed * of_columns) * shape.is_compiled
    return FP64_BYTES * ((layers + recomputed) * forward + layers * backward + again)
