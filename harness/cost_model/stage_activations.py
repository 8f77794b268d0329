"""What a pass through a pipeline stage keeps for backward under each kind of checkpointing. Imports no torch.

The tensors of one layer are those of harness.plan.activations; here it is which of them stay, which are made again in
the backward of their layer, and what is there when.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.schema import CheckpointingConfig
from harness.cost_model.activations import (
    FP32_BYTES,
    INT64_BYTES,
    MicroBatchShape,
    attention_is_decomposed,
    block_tensors,
    masks,
    norm_is_decomposed,
    norm_tensors,
)
from harness.layout.layout import Layout
from harness.layout.partition import Stage
from harness.layout.state_widths import StateWidths


def core_tensors(one: MicroBatchShape) -> dict[str, int]:
    """Bytes of what a second forward of attention's core makes, of those that a layer keeps; it is given the rest."""
    block, model = block_tensors(one), one.model
    made = [name for name in block if name.startswith(CORE)]
    if one.cp > 1:  # gathered from all ranks
        made += ["attention.key", "attention.value"]
    elif attention_is_decomposed(one):
        made += ["attention.query", "attention.key", "attention.value"]
    elif model.attention == "eager":
        made += ["attention.query"] * (one.sequences > 1)  # heads and sequences as one dimension, as products take them
        if one.sequences > 1 or model.num_key_value_heads < model.num_attention_heads:
            made += ["attention.key", "attention.value"]  # or repeated to every head
    return {name: block[name] for name in made}


# What lies between query, key and value and the output: of plain operations, of the fused kernel, of context parallel.
CORE = tuple(f"attention.{name}" for name in ("future_mask", "weights", "dropped", "logsumexp", "chunks"))


def attention_inputs(one: MicroBatchShape) -> dict[str, int]:
    """Bytes of what attention's core is given."""
    size = one.tokens * one.model.hidden_size * one.width // one.tp
    grouped = size * one.model.num_key_value_heads // one.model.num_attention_heads
    return {"attention.query": size, "attention.key": grouped, "attention.value": grouped}


def product_tensors(one: MicroBatchShape) -> dict[str, int]:
    """Bytes of the results that a selectively checkpointed layer keeps: of matrix products, and of attention.

    What a layer keeps anyway has its name of block_tensors. A row-parallel product is this rank's summand, whole.
    """
    block, model = block_tensors(one), one.model
    size, grouped, _ = attention_inputs(one).values()
    kept = {"q_proj": size, "k_proj": grouped, "o_proj": size * one.tp, "down_proj": size * one.tp}
    shared = [f"mlp.{name.removesuffix('_proj')}" for name in model.architecture.widening]
    if model.attention == "eager" or attention_is_decomposed(one):
        width = FP32_BYTES if attention_is_decomposed(one) else one.width
        scores = one.tokens * model.num_attention_heads // one.tp * one.seq_len * width
        seen = scores * (2 * one.cp + 1) // (4 * one.cp) if one.cp > 1 else scores
        kept |= {"v_proj": grouped, "scores": seen, "mixed": size * width // one.width}
    elif one.cp > 1:  # keys and values are gathered again
        kept |= {"v_proj": grouped}
        shared += ["attention.chunks", "attention.logsumexp"]
    else:
        shared += ["attention.value", "attention.output", "attention.logsumexp"]
    return kept | {name: block[name] for name in shared}


def consumed_by_recompute(one: MicroBatchShape, checkpointing: CheckpointingConfig) -> dict[str, int]:
    """Of what a selective forward kept what the second takes and lets go of; it stops before the last product."""
    if checkpointing.name != "selective":
        return {}
    block = block_tensors(one)
    products = product_tensors(one)
    return {name: size for name, size in products.items() if name not in block and name != "down_proj"}


def layer_activations(one: MicroBatchShape, checkpointing: CheckpointingConfig, layer: int) -> dict[str, int]:
    """Bytes of what a layer, by its index in the whole model, keeps before its backward."""
    block = block_tensors(one)
    if checkpointing.name == "attention":
        made = core_tensors(one)
        left = {name: size for name, size in block.items() if name not in made}
        return left | {f"{name}.given": size for name, size in attention_inputs(one).items() if name in made}
    if not checkpointing.recomputes_layer(layer):
        return block
    return {"input": one.hidden_bytes} | (product_tensors(one) if checkpointing.name == "selective" else {})


def recomputed_tensors(one: MicroBatchShape, checkpointing: CheckpointingConfig, layer: int) -> dict[str, int]:
    """Bytes of what a layer's second forward adds to what it keeps; the input is a norm's, if that has no fp32 copy."""
    kept = layer_activations(one, checkpointing, layer)
    made = {name: size for name, size in block_tensors(one).items() if name not in kept}
    if "input" in kept and (one.width == FP32_BYTES or not norm_is_decomposed(one)):
        del made["input_layernorm.input"]
    return made


@dataclass(frozen=True)
class Activations:
    """Bytes held for backward by one micro-batch's pass through a stage, logits left out."""

    before_backward: int
    in_last_norm: int  # when backward is in the final norm or the last layer's second, what that scaled freed
    in_last_block: int  # when backward enters the stage's last layer, its recomputed tensors included
    at_last_scores: int  # when that layer computes (or recomputes) its attention
    second_forward: int  # what one layer's adds; 0 without checkpointing
    in_last_core: int = 0  # when backward comes to that layer's attention, if that alone is recomputed


def activations(one: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig) -> Activations:
    """What a pass through a stage keeps, and has made again in the backward of its last layer."""
    last = stage.layer_indices[-1]
    block, norm = block_tensors(one), head_tensors(one, stage)
    kept, again = layer_activations(one, checkpointing, last), recomputed_tensors(one, checkpointing, last)
    layers, head = layers_bytes(one, stage, checkpointing), sum(norm.values())
    attended = ("input_layernorm", "attention.query", "attention.key", "attention.value", "attention.future_mask")
    until_scores = {name: size for name, size in block.items() if name.startswith(attended)}
    freed = ("mlp", "post_attention_layernorm.output", "post_attention_layernorm.normalised")
    done = sum(size for name, size in block.items() if name.startswith(freed))
    second = sum(again.values())
    in_final_norm = layers + head - weight_pass_bytes(norm, one) if stage.holds_head else 0
    at_scores = layers - sum(kept.values()) + sum(until_scores.values())  # in forward
    if "input" in kept:  # in the second forward
        taken = consumed_by_recompute(one, checkpointing)
        second -= sum(taken.values())
        at_scores = layers + sum(size for name, size in until_scores.items() if name in again)
        at_scores -= sum(size for name, size in taken.items() if name in ("q_proj", "k_proj", "v_proj"))
        done -= sum(size for name, size in kept.items() if name.startswith(freed))
        return Activations(
            layers + head, max(in_final_norm, layers + second - done), layers + second, at_scores, second
        )
    in_last_norm, core = max(in_final_norm, layers - done), 0
    if again:
        ended = ("mlp", "post_attention_layernorm", "attention.output")
        core = layers + second - sum(size for name, size in block.items() if name.startswith(ended))
        weights = sum(size for name, size in again.items() if name.startswith("attention.weights"))
        at_scores = max(at_scores, core - weights)
    return Activations(layers + head, in_last_norm, layers, at_scores, second, core)


def weight_grad_only_bytes(one: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig) -> tuple[int, int]:
    """What is kept when a backward for weights alone enters the last layer, and when it comes to the last matrix.

    It takes them from first to last and frees what their gradients are made of, the rest at its end: where layers are
    called again all of every second forward.
    """
    block, norm = block_tensors(one), head_tensors(one, stage)
    head, left = sum(norm.values()), layers_bytes(one, stage, checkpointing)
    for layer in stage.layer_indices:
        left -= weight_grad_inputs(one, checkpointing, layer)
        left += (
            sum(recomputed_tensors(one, checkpointing, layer).values()) if checkpointing.recomputes_layer(layer) else 0
        )
    freed = weight_pass_bytes(norm, one) + statistics_bytes(norm, one)
    used = weight_grad_inputs(one, checkpointing, stage.layer_indices[-1])
    last = head - freed + norm["norm.output"] if norm else block["mlp.product"]
    return left + used + head, left + last


def layers_bytes(one: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig) -> int:
    """What the layers of a stage keep before backward, what they share, and what the embedding before them keeps."""
    own = one.seq_len // one.cp
    rotary_tables = 0 if one.model.architecture.learned_positions else 2 * own * one.model.head_dim * one.width
    shared = rotary_tables + embedding_bytes(one, stage)
    return shared + sum(sum(layer_activations(one, checkpointing, layer).values()) for layer in stage.layer_indices)


def embedding_bytes(one: MicroBatchShape, stage: Stage) -> int:
    """Token ids, which of them other ranks look up, positions, and what was dropped."""
    if not stage.holds_embedding:
        return 0
    positions = one.seq_len // one.cp * INT64_BYTES if one.model.architecture.learned_positions else 0
    return one.tokens * (INT64_BYTES + (one.vocabulary_tp > 1)) + positions + sum(masks(one, "mask").values())


def head_tensors(one: MicroBatchShape, stage: Stage) -> dict[str, int]:
    return norm_tensors("norm", one) if stage.holds_head else {}


def statistics_bytes(kept: dict[str, int], one: MicroBatchShape) -> int:
    """Bytes of what LayerNorm's one kernel, run once more for weight and bias, needs as it did for its input."""
    if one.model.architecture.norm != "layer":
        return 0
    return sum(size for name, size in kept.items() if name.endswith(("norm.input", "norm.mean", "norm.rstd")))


def weight_grad_inputs(one: MicroBatchShape, checkpointing: CheckpointingConfig, layer: int) -> int:
    """Bytes of what a layer keeps or makes again for its weights' gradients; a kept input stays after them."""
    block = block_tensors(one)
    statistics = statistics_bytes(block, one)
    if statistics and checkpointing.recomputes_layer(layer):  # the first norm's input is the layer's
        statistics -= one.hidden_bytes
    return weight_pass_bytes(block, one) + statistics


def weight_pass_bytes(kept: dict[str, int], one: MicroBatchShape) -> int:
    """Bytes of what is kept for weights' gradients only: inputs of matrices, and what a norm scales on CPU."""
    ends = ["norm.output", "norm.normalised", "mlp.product"]
    if one.model.attention == "eager":
        ends.append("attention.output")  # the flash kernel keeps it too
    return sum(size for name, size in kept.items() if name.endswith(tuple(ends)))


def offloaded_bytes(one: MicroBatchShape, stage: Stage, checkpointing: CheckpointingConfig) -> int:
    """Of what a pass through a stage keeps, what its layers do; what the embedding keeps stays on the device."""
    return layers_bytes(one, stage, checkpointing) - embedding_bytes(one, stage)


def without_offloaded_activations(kept: Activations, bytes_away: int, layers: int) -> Activations:
    """What is left on the device: in the last layer's backward its own part, fetched, is there."""
    others = bytes_away - bytes_away // layers
    return dataclasses.replace(
        kept,
        before_backward=kept.before_backward - bytes_away,
        in_last_norm=kept.in_last_norm - others,
        in_last_block=kept.in_last_block - others,
        at_last_scores=kept.at_last_scores - others,
    )


def host_gradient_bytes(widths: StateWidths, layout: Layout, parameters: Sequence[int]) -> list[int]:
    """Of each of a rank's stages."""
    return [-(-widths.host_gradients * number // layout.shard_count("gradients")) for number in parameters]
