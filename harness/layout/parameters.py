"""The names, shapes and counts of a model's parameters, from its configuration alone."""

import math
from collections.abc import Mapping

from harness.config.schema import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of elements of all these parameters together."""
    return sum(map(math.prod, shapes.values()))


def layer_shapes(model: ModelConfig) -> Shapes:
    """Return the shapes of one decoder layer's parameters by their names in the layer.

    A Hugging Face model's first layer stands for all of them.
    """
    if model.hf_info is not None:
        first = f"{model.hf_info.layers[0]}."
        named = model.hf_info.shapes.items()
        return {name.removeprefix(first): shape for name, shape in named if name.startswith(first)}
    architecture, hidden, inner = model.architecture, model.hidden_size, model.intermediate_size
    key_value_size = model.num_key_value_heads * model.head_dim
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_value_size, hidden),
        "self_attn.v_proj": (key_value_size, hidden),
        "self_attn.o_proj": (hidden, hidden),
        **{f"mlp.{name}": (inner, hidden) for name in architecture.widening},
        "mlp.down_proj": (hidden, inner),
    }
    shapes = norm_shapes("input_layernorm", model) | norm_shapes("post_attention_layernorm", model)
    for name, shape in matrices.items():
        shapes[f"{name}.weight"] = shape
        if architecture.biases:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def unrecomputed_shapes(model: ModelConfig) -> Shapes:
    """Return the shapes of the parameters that a layer's second forward does not use to the end: its last matrix's."""
    if model.hf_info is not None:
        first = f"{model.hf_info.layers[0]}."
        ends = {path.removeprefix(first) for path in model.hf_info.not_recomputed_modules if path.startswith(first)}
        return {name: shape for name, shape in layer_shapes(model).items() if name.rpartition(".")[0] in ends}
    return {name: shape for name, shape in layer_shapes(model).items() if name.startswith("mlp.down_proj")}


def norm_shapes(name: str, model: ModelConfig) -> Shapes:
    """Return the shapes of the parameters of a norm with this name."""
    weight: Shapes = {f"{name}.weight": (model.hidden_size,)}
    return weight | ({f"{name}.bias": (model.hidden_size,)} if model.architecture.has_norm_biases else {})


def embedding_shapes(model: ModelConfig) -> Shapes:
    """Return the shapes of the parameters that turn tokens into hidden states.

    A Hugging Face model has there all that is neither in its decoder layers nor its head.
    """
    if model.hf_info is not None:
        info, head = model.hf_info, head_shapes(model)
        named = info.shapes.items()
        return {name: shape for name, shape in named if name not in head and not info.is_in_decoder_layer(name)}
    tokens: Shapes = {"embed_tokens.weight": (model.vocab_size, model.hidden_size)}
    positions: Shapes = {"embed_positions.weight": (model.context_length, model.hidden_size)}
    return tokens | (positions if model.architecture.learned_positions else {})


def head_shapes(model: ModelConfig) -> Shapes:
    """Return the shapes of the parameters that turn hidden states into logits; a tied matrix is the embedding's."""
    if model.hf_info is not None:
        prefix = f"{model.hf_info.head}."
        return {name: shape for name, shape in model.hf_info.shapes.items() if name.startswith(prefix)}
    head: Shapes = {} if model.tie_word_embeddings else {"lm_head.weight": (model.vocab_size, model.hidden_size)}
    return norm_shapes("norm", model) | head


def layer_parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of one decoder layer."""
    return numel(layer_shapes(model))


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model; a tied embedding counts once."""
    if model.hf_info is not None:
        return numel(model.hf_info.shapes)
    ends = numel(embedding_shapes(model)) + numel(head_shapes(model))
    return ends + model.num_hidden_layers * layer_parameter_count(model)


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Return the shape of every parameter by its name in Hugging Face's Llama; a tied head is the embedding."""
    if model.hf_info is not None:
        return model.hf_info.shapes
    layer = layer_shapes(model)
    layers = {f"layers.{i}.{name}": shape for i in range(model.num_hidden_layers) for name, shape in layer.items()}
    return embedding_shapes(model) | layers | head_shapes(model)
