"""The tensors that one decoder layer keeps under each kind of checkpointing, and recomputes. Imports no torch."""

from harness.config.checkpointing import CheckpointingConfig
from harness.cost_model.activations import block_tensors
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape

# The tensors between query, key, value and output: those of plain operations, a fused kernel and context parallelism.
ATTENTION_CORE = tuple(f"attention.{name}" for name in ("future_mask", "weights", "dropped", "logsumexp", "chunks"))


# The products that a layer keeps for backward without checkpointing too, by their names in block_tensors.
KEPT_PRODUCTS = {"v_proj": "attention.value", "gate_proj": "mlp.gate", "up_proj": "mlp.up"}


def recomputed_attention_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of the tensors that a layer keeps and that a second forward of attention's core computes.

    The second forward takes the layer's other tensors as its inputs.
    """
    block, model = block_tensors(shape), shape.model
    names = [name for name in block if name.startswith(ATTENTION_CORE)]
    if shape.cp > 1:  # gathered from all ranks
        names += ["attention.key", "attention.value"]
    elif shape.attention_is_decomposed:
        names += ["attention.query", "attention.key", "attention.value"]
    elif shape.repeats_grouped_heads:
        names += ["attention.key", "attention.value"]
    elif model.attention == "eager":
        if shape.sequences > 1:  # products copy heads and sequences into one dimension
            names += ["attention.query"]
        if shape.sequences > 1 or model.num_key_value_heads < model.num_attention_heads:
            names += ["attention.key", "attention.value"]  # or repeated to every head
    return {name: block[name] for name in names}


def attention_inputs(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of the inputs of attention's core."""
    size = shape.tokens * shape.model.hidden_size * shape.width // shape.tp
    grouped = size * shape.model.num_key_value_heads // shape.model.num_attention_heads
    return {"attention.query": size, "attention.key": grouped, "attention.value": grouped}


def selectively_saved_tensors(shape: MicroBatchShape, checkpointing: CheckpointingConfig) -> dict[str, int]:
    """Return the bytes of the results of matrix products and of attention that selective checkpointing keeps.

    A tensor that a layer keeps without checkpointing too has its name in block_tensors. A row-parallel product is this
    rank's summand, of full size.
    """
    block, model = block_tensors(shape), shape.model
    size, grouped, _ = attention_inputs(shape).values()
    saved = {"q_proj": size, "k_proj": grouped, "o_proj": size * shape.tp, "down_proj": size * shape.tp}
    shared = [KEPT_PRODUCTS[name] for name in model.architecture.widening]
    if model.attention == "eager" or shape.attention_is_decomposed:
        width = FP32_BYTES if shape.attention_is_decomposed else shape.width
        scores = shape.tokens * model.num_attention_heads // shape.tp * shape.seq_len * width
        visible_scores = scores * (2 * shape.cp + 1) // (4 * shape.cp) if shape.cp > 1 else scores
        saved |= {"v_proj": grouped, "scores": visible_scores, "mixed": size * width // shape.width}
    elif shape.cp > 1:  # keys and values are gathered again
        saved |= {"v_proj": grouped}
        shared += ["attention.chunks", "attention.logsumexp"]
    elif shape.repeats_grouped_heads:  # keys and values are repeated again
        saved |= {"v_proj": grouped}
        shared += ["attention.output", "attention.logsumexp"]
    else:
        shared += [KEPT_PRODUCTS["v_proj"], "attention.output", "attention.logsumexp"]
    saved |= {name: block[name] for name in shared}
    recomputed = checkpointing.recomputed_products(model.architecture.projections)
    return {
        name: size
        for name, size in saved.items()
        if name not in recomputed and name not in [KEPT_PRODUCTS.get(product) for product in recomputed]
    }


def consumed_by_recompute(shape: MicroBatchShape, checkpointing: CheckpointingConfig) -> dict[str, int]:
    """Return the bytes of saved results that a selective second forward takes and frees.

    It stops before the last product.
    """
    if checkpointing.name != "selective":
        return {}
    block = block_tensors(shape)
    saved = selectively_saved_tensors(shape, checkpointing)
    return {name: size for name, size in saved.items() if name not in block and name != "down_proj"}


def layer_activations(shape: MicroBatchShape, checkpointing: CheckpointingConfig, layer: int) -> dict[str, int]:
    """Return the bytes that a layer, by its index in the whole model, keeps before its backward, by tensor."""
    block = block_tensors(shape)
    if checkpointing.name == "attention":
        recomputed = recomputed_attention_tensors(shape)
        saved = {name: size for name, size in block.items() if name not in recomputed}
        return saved | {f"{name}.input": size for name, size in attention_inputs(shape).items() if name in recomputed}
    if not checkpointing.recomputes_layer(layer):
        return block
    saved = selectively_saved_tensors(shape, checkpointing) if checkpointing.name == "selective" else {}
    return {"input": shape.hidden_bytes} | saved


def recomputed_tensors(shape: MicroBatchShape, checkpointing: CheckpointingConfig, layer: int) -> dict[str, int]:
    """Return the bytes that a layer's second forward adds to what the layer keeps, by tensor.

    The layer's input is also its first norm's, if that keeps no fp32 copy.
    """
    saved = layer_activations(shape, checkpointing, layer)
    recomputed = {name: size for name, size in block_tensors(shape).items() if name not in saved}
    if "input" in saved and (shape.width == FP32_BYTES or not shape.norm_is_decomposed):
        del recomputed["input_layernorm.input"]
    return recomputed
