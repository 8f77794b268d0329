"""The tensors that a micro-batch's forward saves for backward on one rank, and backward's own. Imports no torch.

The formulas follow Korthikanti et al. (arXiv 2205.05198), derived anew for the blocks that run here: RMSNorm or
LayerNorm, grouped heads, a flash kernel, SwiGLU or GELU. Tensor parallelism divides what lies between the matrices of
attention and MLP; sequence parallelism also divides the norms and the residual stream, but not the norms' outputs: each
is gathered for the projections, which keep it whole.

The paper's GPT layer keeps sbh(34 + 5as/h) bytes in 16 bit with eager attention and dropout. Ours keeps on CUDA
34sbh + 7as²b + 16sb + s²: the softmax is computed and kept in fp32 (4as²b, not 2), and the norms' statistics (a mean
and a reciprocal root in fp32 each) and the causal mask are kept too. On CPU a dropout's mask is as wide as what it
drops, not a byte: 36sbh + 8as²b + 8sb + s². The flash kernel keeps 34sbh + 4asb + 16sb on CUDA; a CPU has none with
dropout: scaled_dot_product_attention runs plain operations in fp32, which keep 42sbh + 12as²b + 8sb.
"""

import math

from harness.cost_model.attention_activations import attention_tensors
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape


def norm_tensors(name: str, shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that one norm keeps for backward, and its output, which the projections behind it keep.

    On CPU torch computes RMSNorm by plain operations in fp32, which keep two fp32 copies. On CUDA, and for LayerNorm
    everywhere, one kernel keeps its input. The statistics are fp32, but a CPU's LayerNorm has them as wide as its
    input.
    """
    decomposed, statistic_width = shape.norm_is_decomposed, FP32_BYTES
    if shape.device == "cpu" and not decomposed:
        statistic_width = shape.width
    size = shape.residual_tokens * shape.model.hidden_size
    tensors = {
        f"{name}.input": size * (FP32_BYTES if decomposed else shape.width),
        f"{name}.rstd": shape.residual_tokens * statistic_width,
    }
    if shape.model.architecture.norm == "layer":
        tensors[f"{name}.mean"] = shape.residual_tokens * statistic_width
    if decomposed:
        tensors[f"{name}.normalized"] = size * FP32_BYTES
    return tensors | {f"{name}.output": shape.tokens * shape.model.hidden_size * shape.width}


def dropout_masks(shape: MicroBatchShape, *names: str) -> dict[str, int]:
    """Return the bytes of dropout masks of the residual stream, by these names; none without dropout."""
    size = shape.residual_tokens * shape.model.hidden_size * shape.dropout_mask_width
    return dict.fromkeys(names, size) if shape.model.dropout else {}


def block_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of every tensor that one decoder layer keeps for backward, by name."""
    inner = shape.tokens * shape.model.intermediate_size * shape.width // shape.tp
    return {
        **norm_tensors("input_layernorm", shape),
        **{f"attention.{name}": size for name, size in attention_tensors(shape).items()},
        **dropout_masks(shape, "attention.mask"),
        **norm_tensors("post_attention_layernorm", shape),
        **{f"mlp.{name}": inner for name in shape.model.architecture.mlp_saved_tensors},
        **dropout_masks(shape, "mlp.mask"),
    }


def block_backward_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes of intermediates' gradients at the worst moment of a layer's backward, beyond what it kept.

    That moment is at the SwiGLU product: there are gradients of product, silu and up, less the product freed before,
    and of the residual stream; the architecture says how many of them have the inner width. With sequence parallelism
    the residual's gradient is gathered before that: it exists twice, then beside the product's.
    """
    inner = shape.tokens * shape.model.intermediate_size * shape.width // shape.tp
    gathered = shape.tokens * shape.model.hidden_size * shape.width if shape.sequence_parallel else 0
    matrix = shape.model.hidden_size * shape.model.intermediate_size * shape.width // shape.tp
    tensors, matrices = shape.model.architecture.mlp_backward_peak
    return max(tensors * inner + matrices * matrix, inner + gathered, 2 * gathered) + shape.hidden_bytes


def recompute_allreduce_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes that exist beside the kept tensors at the end of a second forward, where ranks sum and drop out.

    They are the pending gradient, the summand and three copies of the tensor-parallel ranks' sum, as DTensor passes it
    on; the dropout's mask does not exist yet.
    """
    if shape.tp == 1 or not shape.model.dropout:
        return 0
    gradient = shape.tokens * shape.model.hidden_size * shape.width
    return gradient + 4 * shape.hidden_bytes - sum(dropout_masks(shape, "mask").values())


def norm_gradient_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes of the gradient of a norm's output, as wide as the norm computes."""
    return shape.residual_tokens * shape.model.hidden_size * (FP32_BYTES if shape.norm_is_decomposed else shape.width)


def norm_backward_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes of gradients at the worst moment of a norm's backward.

    They are the gradients of its output and its input and, where the norm is decomposed, of three operations between.
    """
    return (5 if shape.norm_is_decomposed else 2) * norm_gradient_bytes(shape)


def deferred_weight_grad_inputs(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that a backward for inputs alone leaves for a layer's weights: gradients of their outputs."""
    model = shape.model
    hidden, inner = (shape.tokens * size * shape.width for size in (model.hidden_size, model.intermediate_size))
    grouped = hidden * model.num_key_value_heads // model.num_attention_heads
    columns = {"q_proj": hidden, "k_proj": grouped, "v_proj": grouped} | dict.fromkeys(
        model.architecture.widening, inner
    )
    rows = dict.fromkeys(("o_proj", "down_proj"), hidden)
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), norm_gradient_bytes(shape))
    return norms | rows | {name: size // shape.tp for name, size in columns.items()}


def logits_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes of this rank's part of the fp32 logits of those tokens that go through the loss at once."""
    return shape.tokens // shape.loss_chunks * math.ceil(shape.model.vocab_size / shape.vocabulary_tp) * FP32_BYTES


def loss_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes at the worst moment of logits and cross-entropy, in fp32: backward of the log-softmax.

    torch's loss over logits that are cut along the vocabulary runs it by plain operations, with four tensors at once.
    """
    names = ["log_probabilities", "log_probabilities.gradient", "logits.gradient"]
    return dict.fromkeys(names + ["probabilities"] * (shape.vocabulary_tp > 1), logits_bytes(shape))
