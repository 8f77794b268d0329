"""The tensors that a micro-batch's forward saves for backward on one rank, under each kind of checkpointing. No torch.

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

from functools import lru_cache

from harness.config.schema import CheckpointingConfig
from harness.cost_model.attention_activations import attention_tensors
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape
from harness.layout.layer_spec import layer_matrices

# The tensors between query, key, value and output: those of plain operations, a fused kernel and context parallelism.
ATTENTION_CORE = tuple(f"attention.{name}" for name in ("future_mask", "weights", "dropped", "logsumexp", "chunks"))


def norm_tensors(name: str, shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that one norm keeps for backward, and its output, which the projections behind it keep.

    On CPU torch computes RMSNorm by plain operations in fp32, which keep two fp32 copies. On CUDA, and for LayerNorm
    everywhere, one kernel keeps its input. The statistics are fp32, but a CPU's LayerNorm has them as wide as its
    input.
    """
    decomposed = shape.norm_is_decomposed
    statistic_width = shape.width if shape.device == "cpu" and not decomposed else FP32_BYTES
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


@lru_cache(maxsize=4096)
def block_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of every tensor that one decoder layer keeps for backward, by name."""
    tensors: dict[str, int] = {}
    for branch in shape.model.architecture.branches:
        tensors |= norm_tensors(branch.norm, shape)
        for operator in branch.operators:
            if operator.kind == "attention":
                tensors |= {f"{branch.name}.{name}": size for name, size in attention_tensors(shape).items()}
            elif operator.kind == "function":
                tensors |= {f"{branch.name}.{name}": shape.tensor_bytes(name) for name in operator.inputs}
            elif operator.kind == "row":
                tensors.setdefault(f"{branch.name}.{operator.inputs[0]}", shape.tensor_bytes(operator.inputs[0]))
        if shape.model.dropout:
            tensors[f"{branch.name}.mask"] = shape.dropout_mask_bytes
    return tensors


@lru_cache(maxsize=4096)
def loss_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes at the worst moment of logits and cross-entropy, in fp32: backward of the log-softmax.

    They are the log-probabilities and two gradients. torch's loss over logits that are cut along the vocabulary runs it
    by plain operations, with the probabilities beside them.
    """
    return (3 + (shape.vocabulary_tp > 1)) * shape.logits_bytes


def recomputed_attention_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of the tensors that a layer keeps and that a second forward of attention's core computes.

    The second forward takes the layer's other tensors as its inputs.
    """
    block, model = block_tensors(shape), shape.model
    is_eager, is_grouped = model.attention == "eager", model.num_key_value_heads < model.num_attention_heads
    # Eager products copy heads and sequences into one dimension, plain operations into fp32.
    is_copied = shape.attention_is_decomposed or (is_eager and shape.sequences > 1)
    is_repeated = shape.repeats_grouped_heads or (is_eager and is_grouped)
    is_gathered = shape.cp > 1  # from all ranks
    names = [name for name in block if name.startswith(ATTENTION_CORE)]
    names += ["attention.query"] * (is_copied and not is_gathered)
    names += ["attention.key", "attention.value"] * (is_copied or is_repeated or is_gathered)
    return {name: block[name] for name in names}


def selectively_saved_tensors(shape: MicroBatchShape, checkpointing: CheckpointingConfig) -> dict[str, int]:
    """Return the bytes of the results of matrix products and of attention that selective checkpointing keeps.

    A tensor that a layer keeps without checkpointing too has its name in block_tensors. A row-parallel product is this
    rank's summand, of full size.
    """
    block, model, size, grouped = block_tensors(shape), shape.model, shape.query_bytes, shape.key_bytes
    operators = [(branch.name, operator) for branch in model.architecture.branches for operator in branch.operators]
    products = {
        operator.matrix: f"{name}.{operator.output}" for name, operator in operators if operator.kind == "column"
    }
    saved = {each.matrix: shape.whole_hidden_bytes for _, each in operators if each.kind == "row"}
    saved |= {"q_proj": size, "k_proj": grouped}
    shared = [product for product in products.values() if not product.startswith("attention.")]
    has_scores = model.attention == "eager" or shape.attention_is_decomposed
    if has_scores:
        width = FP32_BYTES if shape.attention_is_decomposed else shape.width
        scores = shape.tokens * model.num_attention_heads // shape.tp * shape.seq_len * width
        visible_scores = scores * (2 * shape.cp + 1) // (4 * shape.cp) if shape.cp > 1 else scores
        saved |= {"scores": visible_scores, "mixed": size * width // shape.width}
    else:
        shared += ["attention.chunks" if shape.cp > 1 else "attention.output", "attention.logsumexp"]
    if has_scores or shape.cp > 1 or shape.repeats_grouped_heads:  # values are gathered or repeated again
        saved["v_proj"] = grouped
    else:
        shared.append(products["v_proj"])
    saved |= {name: block[name] for name in shared}
    recomputed = checkpointing.recomputed_products(matrix.name for matrix in layer_matrices(model))
    not_saved = {*recomputed, *(products.get(name) for name in recomputed)}
    return {name: size for name, size in saved.items() if name not in not_saved}


def layer_activations(
    shape: MicroBatchShape, checkpointing: CheckpointingConfig, is_recomputed: bool
) -> dict[str, int]:
    """Return the bytes that a layer keeps before its backward, by tensor."""
    block = block_tensors(shape)
    if checkpointing.name == "attention":
        recomputed = recomputed_attention_tensors(shape)
        saved = {name: size for name, size in block.items() if name not in recomputed}
        inputs = {f"attention.{name}": shape.tensor_bytes(name) for name in ("query", "key", "value")}
        return saved | {f"{name}.input": size for name, size in inputs.items() if name in recomputed}
    if not is_recomputed:
        return block
    saved = selectively_saved_tensors(shape, checkpointing) if checkpointing.name == "selective" else {}
    return {"input": shape.hidden_bytes} | saved


def recomputed_tensors(shape: MicroBatchShape, saved: dict[str, int]) -> dict[str, int]:
    """Return the bytes that a layer's second forward adds to what the layer has saved, by tensor.

    The layer's input is also its first norm's, if that keeps no fp32 copy.
    """
    recomputed = {name: size for name, size in block_tensors(shape).items() if name not in saved}
    if "input" in saved and (shape.width == FP32_BYTES or not shape.norm_is_decomposed):
        del recomputed["input_layernorm.input"]
    return recomputed
